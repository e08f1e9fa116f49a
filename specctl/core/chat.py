"""DATA as samples: rows through a chat template and a tokenizer into ids and a loss mask.

Knows tokenizers and what makes a row useless; where an answer lies in a rendered chat is known to
`masks`, what a row means to `conversations`.

- BOS is there exactly once where the tokenizer wants one, whoever writes it, template or tokenizer.
- A token is supervised iff its first character lies in an answer.
- A chat that goes on after its last answer is kept whole; what follows is not supervised.
- Too long samples are cut on the tokenizer's `truncation_side`, ids and mask alike; cut on the left
  they lose their BOS.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specctl.core import thoughts
from specctl.core.conversations import NO_ROLES, Row, read_rows
from specctl.core.masks import (
    REASONING,
    RenderError,
    Span,
    Template,
    UnlocatedError,
    assistant_spans,
)
from specctl.core.templates import check_template
from specctl.errors import NotSupportedError, TargetError
from specctl.records.conversation import Conversation, PlainText, Tokenized
from specctl.records.sample import Dropped, Sample, content_id

MIN_TOKENS: Final = 2  # one token predicts nothing

Ids = NDArray[np.int32]
Mask = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Encoder:
    """A tokenizer with what is asked of it for every row."""

    tokenizer: Any
    template: Template | None
    bos_id: int | None
    max_length: int
    vocab_size: int | None


def samples(
    paths: Sequence[str],
    tokenizer: Any,
    *,
    template: str | None,
    max_length: int,
    role_map: Mapping[str, str] = NO_ROLES,
    vocab_size: int | None = None,
) -> Iterator[Sample | Dropped]:
    """Every row of the files as a sample, or as Dropped with its reason; in order, streaming.

    Raises what `read_rows` and `tokenize` raise.
    """
    encoder = _encoder(tokenizer, template, max_length, vocab_size)
    for row in read_rows(paths, role_map=role_map):
        yield _sample(row, encoder)


def tokenize(
    row: Row, tokenizer: Any, *, template: str | None, max_length: int, vocab_size: int | None = None
) -> Sample | Dropped:
    """One row as a sample of at most `max_length` tokens, or why it gives none.

    Without `vocab_size` the ids of pre-tokenised rows are not checked against the vocabulary.
    Raises TargetError for a chat when there is no template, or the template is not one;
    NotSupportedError for a chat when the tokenizer cannot say which characters a token covers.
    """
    return _sample(row, _encoder(tokenizer, template, max_length, vocab_size))


def effective_template(tokenizer: Any, override: str | None) -> str | None:
    """The chat template's text: `override` (text, a file, or the name of one of the tokenizer's), else
    the tokenizer's own; of several the one called `default`. None when there is none.

    Raises TargetError when the file cannot be read, no default is named, or the text is no template.
    """
    own = tokenizer.chat_template
    named = own if isinstance(own, dict) else {}
    if override is None:
        text = own if not named else named.get("default")
        if named and text is None:
            raise TargetError(
                f"the tokenizer has {len(named)} chat templates and none is called `default`",
                hint=f"choose one: `--chat-template {min(named)}` (there are {', '.join(sorted(named))})",
            )
    else:
        text = named.get(override) or (override if "{" in override else _read_template(override))
    if text is not None:
        check_template(text)
    return text


def template_hash(template: str | None) -> str:
    """The SHA-256 of the template's text: its name and the file's time do not matter."""
    return hashlib.sha256(b"none" if template is None else b"text\0" + template.encode()).hexdigest()


def tokenizer_hash(tokenizer: Any) -> str:
    """The SHA-256 of all that decides which ids a text becomes: vocabulary, rules, special tokens."""
    state: dict[str, Any] = {"special": _special_tokens(tokenizer), "side": tokenizer.truncation_side}
    digest = hashlib.sha256()
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        if backend.truncation is not None or backend.padding is not None:
            # The last call's settings, not the tokenizer's.
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
        digest.update(backend.to_str().encode())
    else:
        state["vocab"] = tokenizer.get_vocab()
    digest.update(json.dumps(state, sort_keys=True).encode())
    return digest.hexdigest()


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TargetError(f"the chat template cannot be read: {reason}", where=path) from error


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """The variables that transformers gives to a template."""
    return dict(tokenizer.special_tokens_map)


def _encoder(tokenizer: Any, template: str | None, max_length: int, vocab_size: int | None) -> _Encoder:
    parts = None
    if template is not None:
        check_template(template)
        special = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
        closings = (special - {tokenizer.bos_token}) | ({tokenizer.eos_token} - {None})
        parts = Template(template, _special_tokens(tokenizer), tuple(sorted(closings)))
    return _Encoder(tokenizer, parts, own_bos(tokenizer), max_length, vocab_size)


def _sample(row: Row, encoder: _Encoder) -> Sample | Dropped:
    if isinstance(row, Dropped):
        return row
    if isinstance(row, Tokenized):
        return _from_tokens(row, encoder)
    if isinstance(row, PlainText):
        ids = with_one_bos(encoder.tokenizer(row.text, verbose=False)["input_ids"], encoder.bos_id)
        return _finished(row, np.array(ids, np.int32), np.ones(len(ids), np.uint8), encoder)
    return _from_chat(row, encoder)


def _from_tokens(row: Tokenized, encoder: _Encoder) -> Sample | Dropped:
    if encoder.vocab_size is not None and max(row.input_ids) >= encoder.vocab_size:
        return Dropped(
            row.where,
            "id_out_of_range",
            f"input id {max(row.input_ids)}; the vocabulary ends at {encoder.vocab_size - 1}",
        )
    return _finished(row, np.array(row.input_ids, np.int32), np.array(row.loss_mask, np.uint8), encoder)


def _from_chat(row: Conversation, encoder: _Encoder) -> Sample | Dropped:
    if encoder.template is None:
        raise TargetError(
            "the tokenizer has no chat_template", where=row.where, hint="pass one with `--chat-template FILE`"
        )
    if (refusal := _unanswered(row)) is not None:
        return refusal
    messages = [thoughts.with_reasoning(turn.message(), encoder.template.text) for turn in row.turns]
    try:
        is_open = row.is_cut and thoughts.is_cut_in_thought(messages[-1])
        found = thoughts.cut_thought(row, messages, encoder.template) if is_open else None
        text, spans = found or assistant_spans(encoder.template, messages, tools=row.tools)
    except RenderError as error:
        return Dropped(row.where, "template_error", error.message)
    except UnlocatedError as error:
        return Dropped(row.where, "no_assistant_span", error.message)
    if not spans:
        return Dropped(row.where, "no_assistant_span", "the template shows none of the answers")
    if (name := thoughts.hidden_call(messages, text)) is not None:
        return Dropped(row.where, "tool_call_not_shown", f"the template does not show the call of `{name}`")
    if found is None and not row.is_cut and thoughts.hides_thought(messages, text):
        last = text[slice(*spans[-1])].rstrip()
        closing = max((c for c in encoder.template.closings if last.endswith(c)), key=len, default="")
        shown = thoughts.shown_thought(row, messages, encoder.template, closing)
        if shown is None:
            return Dropped(row.where, "reasoning_not_shown", "the template does not show the reasoning of the answer")
        text, spans = shown
    if row.is_cut and found is None:
        text, spans = thoughts.without_end(text, spans, row.turns[-1].content.strip())
    ids, mask = _encoded(text, spans, encoder)
    return _finished(row, ids, mask, encoder)


def _unanswered(row: Conversation) -> Dropped | None:
    answers = [turn for turn in row.turns if turn.role == "assistant"]
    if not answers:
        return Dropped(row.where, "no_assistant", "no turn is the assistant's")
    keys = ("tool_calls", *REASONING)
    if not any(turn.content.strip() or any(turn.extra.get(key) for key in keys) for turn in answers):
        return Dropped(row.where, "empty_answer", "the assistant says nothing in any turn")
    return None


def _encoded(text: str, spans: Sequence[Span], encoder: _Encoder) -> tuple[Ids, Mask]:
    if not encoder.tokenizer.is_fast:
        raise NotSupportedError(
            f"`{type(encoder.tokenizer).__name__}` cannot say which characters a token covers",
            hint="use a tokenizer with a `tokenizer.json`, or pass rows of `input_ids` and `loss_mask`",
        )
    output = encoder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = output["input_ids"]
    mask = _supervised(np.array(output["offset_mapping"], np.int64).reshape(-1, 2), spans)
    whole = with_one_bos(ids, encoder.bos_id)
    if len(whole) > len(ids):
        mask = np.concatenate((np.zeros(1, np.uint8), mask))
    return np.array(whole, np.int32), mask[len(mask) - len(whole) :]


def _supervised(offsets: NDArray[np.int64], spans: Sequence[Span]) -> Mask:
    """uint8 [T]: 1 where the token's first character is in a span. `offsets` [T, 2], in characters."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    # Byte-level tokenizers may trim a blank token to nothing, at its end: it began where the last ended.
    before = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    firsts = np.where(starts == ends, np.minimum(starts, before), starts)
    edges = np.array(spans, np.int64).reshape(-1)
    # Spans rise: a position is inside one iff an odd number of edges is at or before it.
    return (np.searchsorted(edges, firsts, side="right") % 2).astype(np.uint8)


def own_bos(tokenizer: Any) -> int | None:
    """The id that the tokenizer puts before every text by itself, None when it puts none."""
    added = tokenizer("a", add_special_tokens=True)["input_ids"]
    return tokenizer.bos_token_id if added and added[0] == tokenizer.bos_token_id else None


def with_one_bos(ids: list[int], bos_id: int | None) -> list[int]:
    """`ids` with exactly one `bos_id` in front, whether a template wrote none, one or several."""
    if bos_id is None:
        return ids
    count = next((i for i, token in enumerate(ids) if token != bos_id), len(ids))
    return [bos_id, *ids[count:]]


def check_ids(ids: Ids | Sequence[int], vocab_size: int | None, tokenizer: Any) -> None:
    """Raises TargetError for an id that the target's embedding has no row for: tokens were added, and it was not."""
    highest = int(np.max(ids)) if len(ids) else 0
    if vocab_size is not None and highest >= vocab_size:
        raise TargetError(
            f"the tokenizer gives id {highest} (`{tokenizer.convert_ids_to_tokens(highest)}`), and the target's "
            f"embedding ends at {vocab_size - 1}",
            hint="tokens were added to the tokenizer and not to the model; use the tokenizer the target came with",
        )


def _finished(row: Conversation | PlainText | Tokenized, ids: Ids, mask: Mask, encoder: _Encoder) -> Sample | Dropped:
    if not mask.any():
        return Dropped(row.where, "nothing_supervised", "no token is supervised")
    check_ids(ids, encoder.vocab_size, encoder.tokenizer)
    kept = slice(None, encoder.max_length)
    if encoder.tokenizer.truncation_side == "left":
        kept = slice(max(0, len(ids) - encoder.max_length), None)
    is_truncated = len(ids) > encoder.max_length
    ids, mask = ids[kept], mask[kept]
    if len(ids) < MIN_TOKENS:
        return Dropped(row.where, "too_short", f"{len(ids)} token; {MIN_TOKENS} are needed")
    if not mask.any():
        return Dropped(row.where, "truncated_away", f"no supervised token within {encoder.max_length} tokens")
    return Sample(row.row_id or content_id(ids, mask), ids, mask, row.where, is_truncated)

"""Which token of a text was drafted, kept, refused, or the target's own; and that text as HTML.

Each kind differs by line and weight as well as by colour.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final, TypeAlias

from specctl.core.intervals import length
from specctl.records.evaluation import UNTOLD, PromptResult

ACCEPTED: Final = "accepted"
CORRECTED: Final = "corrected"
BONUS: Final = "bonus"
REFUSED: Final = "refused"
PLAIN: Final = "plain"
NOT_TOLD: Final = "untold"

KINDS: Final = {
    ACCEPTED: "drafted, and what the target would have said",
    REFUSED: "drafted, and not kept; servers do not tell these",
    CORRECTED: "the target's own token in place of a refused one",
    BONUS: "the target's own token after all drafted ones were kept",
    PLAIN: "the target's own token where nothing was drafted",
    NOT_TOLD: "a server told how many were kept, and not which",
}
"""Each kind and what it means, in the order of the legend."""

_CONTEXT: Final = 8
"""Tokens before a token that are decoded with it: whether it begins with a space hangs on them."""

_LONGEST_PROMPT: Final = 600

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens as they stand."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A token of a transcript, and the place in the text at which it stands or would have stood."""

    token: int
    kind: str
    index: int


def marks(result: PromptResult) -> list[list[Mark]]:
    """The tokens of a text step by step, refused ones before what replaced them; cut where the text was cut.

    The first list is the token that came with the prompt, or all of them where no steps were told.
    """
    end = len(result.tokens)
    if result.steps is None:
        return [[Mark(token, NOT_TOLD, at)] for at, token in enumerate(result.tokens)]
    found = [[Mark(token, PLAIN, 0) for token in result.tokens[:1]]]
    at = 1
    for drafted, kept in result.steps:
        if at >= end:
            break
        step = [Mark(token, ACCEPTED, at + i) for i, token in enumerate(drafted[:kept]) if at + i < end]
        own = at + kept
        if own < end:
            refused = enumerate(token for token in drafted[kept:] if token != UNTOLD)
            step += [Mark(token, REFUSED, own + i) for i, token in refused]
            step.append(Mark(result.tokens[own], _own_kind(drafted, kept), own))
        found.append(step)
        at = own + 1
    return found


def chosen(results: Sequence[PromptResult]) -> list[tuple[str, PromptResult]]:
    """The texts of the lowest, the middle and the highest acceptance length, with those words."""
    ranked = [(value, i) for i, r in enumerate(results) if (value := length(r.counts())) is not None]
    ranked.sort()
    places = dict.fromkeys((0, len(ranked) // 2, len(ranked) - 1)) if ranked else {}
    words = {0: "lowest", len(ranked) - 1: "highest"}
    return [(f"{words.get(p, 'middle')}, {ranked[p][0]:.2f}", results[ranked[p][1]]) for p in places]


def transcript(result: PromptResult, decode: Decode | None) -> str:
    """The text of a prompt and its answer as HTML, a span for each token."""
    steps = "".join(_step(result, step, decode) for step in marks(result))
    return f'<p class="prompt">{_prompt(result, decode)}</p><p class="text">{steps}</p>'


def legend() -> str:
    """What each kind looks like and means."""
    items = "".join(f'<li><span class="token {kind}">{kind}</span>: {escape(KINDS[kind])}</li>' for kind in KINDS)
    return f'<ul class="legend">{items}</ul>'


def visible(text: str) -> str:
    """`text` for a page: markup escaped, line ends shown, and nothing that steers the reader's screen."""
    plain = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return escape(plain).replace("\n", "&crarr;\n")


def _own_kind(drafted: Sequence[int], kept: int) -> str:
    return PLAIN if not drafted else BONUS if kept == len(drafted) else CORRECTED


def _before(result: PromptResult, step: Sequence[Mark], place: int) -> list[int]:
    """The last tokens before a mark: those of the text, and refused ones of its draft before it."""
    mark = step[place]
    refused = [m.token for m in step[:place] if m.kind == REFUSED] if mark.kind == REFUSED else []
    text = [*result.prompt_ids[-_CONTEXT:], *result.tokens[: mark.index - len(refused)]]
    return [*text, *refused][-_CONTEXT:]


def _step(result: PromptResult, step: Sequence[Mark], decode: Decode | None) -> str:
    spans = (_span(mark, _before(result, step, i), decode) for i, mark in enumerate(step))
    return f'<span class="step">{"".join(spans)}</span>'


def _span(mark: Mark, before: list[int], decode: Decode | None) -> str:
    said = f"{mark.kind}, token {mark.token} at {mark.index}"
    text = visible(_piece(mark.token, before, decode))
    # A refused line end is shown and not obeyed: the text has none there.
    text = text.replace("\n", "") if mark.kind == REFUSED else text
    return f'<span class="token {mark.kind}" title="{said}">{text}</span>'


def _piece(token: int, before: list[int], decode: Decode | None) -> str:
    """What a token adds to the text before it; its id in brackets where it adds no whole character."""
    if decode is None:
        return f"[{token}]"
    shorter, longer = decode(before), decode([*before, token])
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    return longer[same:] if longer[same:].strip("\ufffd") else f"[{token}]"


def _prompt(result: PromptResult, decode: Decode | None) -> str:
    if decode is None:
        return f"{len(result.prompt_ids)} tokens"
    text = decode(result.prompt_ids)
    return visible(text if len(text) <= _LONGEST_PROMPT else f"...{text[-_LONGEST_PROMPT:]}")

"""Greedy speculative decoding of one sequence in one process: what a draft's acceptance is measured with.

Plain on purpose. The target is any causal LM of transformers; its greedy tokens decide, the draft only
proposes, so in fp32 the output is that of plain greedy decoding, token for token.

Legend: n verified tokens, K draft tokens, H the draft's hidden size.
Source: arXiv 2211.17192; slot layout vllm `spec_decode/utils.py` (docs/design.md, Slot frame).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from specctl.core.capture import Recorder, record
from specctl.core.modules import DraftCache, DraftModel
from specctl.core.target import LoadedTarget
from specctl.errors import UsageError
from specctl.records.layers import NORM


@dataclass(frozen=True, slots=True)
class Decoded:
    """New tokens, up to and with a stop token, and what verifying drafts came to.

    `num_drafts` counts the target's forwards that verified a draft, `proposed[i]` those whose draft
    reached position i, `accepted[i]` those that kept it.
    """

    tokens: tuple[int, ...]
    num_drafts: int
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]

    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, the bonus token included; None where nothing was drafted.

        Source: vLLM's spec-decode metrics, 1 + num_accepted_tokens / num_drafts.
        """
        return 1 + sum(self.accepted) / self.num_drafts if self.num_drafts else None


@torch.inference_mode()
def decode_greedily(
    target: LoadedTarget,
    draft: DraftModel | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    num_draft_tokens: int = 1,
    stop_ids: Sequence[int] = (),
) -> Decoded:
    """Continue `prompt` by the target's greedy tokens, verifying what `draft` (None: nothing) proposes.

    Raises UsageError for a draft that does not say which states it takes, or an empty prompt.
    """
    if not prompt or num_draft_tokens < 1:
        raise UsageError("decoding needs a prompt of at least one token, and at least one draft token")
    verifier = _Verifier(target, _slots(draft))
    proposer = None if draft is None else _Proposer(draft)
    tokens, proposed, accepted = list(prompt), [0] * num_draft_tokens, [0] * num_draft_tokens
    num_drafts = 0
    greedy, states = verifier.run(tokens, kept=0)
    tokens.append(int(greedy[-1]))
    while len(tokens) - len(prompt) < max_new_tokens and tokens[-1] not in stop_ids:
        room = max_new_tokens - (len(tokens) - len(prompt)) - 1
        drafted = [] if proposer is None else proposer.propose(tokens, states, min(room, num_draft_tokens))
        known = len(tokens) - 1
        greedy, states = verifier.run([*tokens, *drafted], kept=known)
        hits = next((i for i, token in enumerate(drafted) if token != int(greedy[i])), len(drafted))
        hits = _until_stop(drafted[:hits], stop_ids)
        tokens += [*drafted[:hits], *([] if hits and drafted[hits - 1] in stop_ids else [int(greedy[hits])])]
        states = states[: hits + 1]
        num_drafts += bool(drafted)
        for i in range(len(drafted)):
            proposed[i] += 1
            accepted[i] += i < hits
    return Decoded(tuple(tokens[len(prompt) :]), num_drafts, tuple(proposed), tuple(accepted))


class _Verifier:
    """The target with its cache; a class for the cache's state between calls."""

    def __init__(self, target: LoadedTarget, slots: tuple[str, ...]) -> None:
        self._target, self._slots = target, slots
        self._cache, self._held = _cache(target), 0
        # transformers renamed the argument in 5.24.
        known = inspect.signature(target.model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    def run(self, tokens: Sequence[int], *, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens [m] after each token past the first `kept`, and those tokens' states [m, A*D].

        Whatever the cache holds beyond `kept` was refused and is forgotten.
        """
        model: Any = self._target.model
        start = kept if self._cache is not None else 0
        if self._cache is not None and self._held > kept:
            self._cache.crop(kept - self._held)
        ids = torch.tensor([tokens[start:]], device=self._target.device)
        recorder = Recorder()
        with ExitStack() as stack:
            if self._slots:
                stack.enter_context(record(self._target.decoder, self._slots, recorder, model=model))
            output = model(input_ids=ids, use_cache=self._cache is not None, **{self._cache_name: self._cache})
        self._held = len(tokens)
        greedy = output.logits[0, kept - start :].argmax(-1)
        if not self._slots:
            return greedy, greedy.new_zeros(len(greedy), 0)
        states = recorder.take(self._slots, model).values()
        return greedy, torch.cat([s[0, kept - start :] for s in states], dim=-1)


class _Proposer:
    """The draft with its cache; a class for the cache's state between calls."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft, self._cache = draft, DraftCache(draft)

    def propose(self, tokens: Sequence[int], states: torch.Tensor, count: int) -> list[int]:
        """At most `count` tokens that follow `tokens`, the last of which has no state yet.

        `states` [m, A*D] are those of the m verified tokens before it that the draft has not seen.
        """
        draft, start = self._draft, len(self._cache)
        ids, hidden = torch.tensor(tokens[start + 1 :], device=states.device), draft.project(states)
        assert ids.shape[0] == hidden.shape[0], (ids.shape, hidden.shape)
        run = self._in_parallel if draft.head.parallel_drafting else self._one_by_one
        found = run(ids, hidden, count)
        self._cache.crop(len(tokens) - 1)
        return found

    def _in_parallel(self, ids: torch.Tensor, hidden: torch.Tensor, count: int) -> list[int]:
        masked = max(count - 1, 0)
        ids = torch.cat((ids, *[self._draft.reserved_id()] * masked))
        hidden = torch.cat((hidden, *[self._draft.masked_projection()] * masked))
        normed = self._draft.norm(self._cache.run(ids, hidden))
        return self._tokens(normed[-1 - masked :])[:count]

    def _one_by_one(self, ids: torch.Tensor, hidden: torch.Tensor, count: int) -> list[int]:
        found: list[int] = []
        while True:
            stream = self._cache.run(ids, hidden)[-1:]
            normed = self._draft.norm(stream)
            if len(found) < count:
                found += self._tokens(normed)
            if len(found) >= count:
                return found
            ids, hidden = ids.new_tensor(found[-1:]), self._draft.next_hidden(stream, normed)

    def _tokens(self, normed: torch.Tensor) -> list[int]:
        ids: list[int] = self._draft.target_ids(self._draft.logits(normed).argmax(-1)).tolist()
        return ids


def _until_stop(tokens: Sequence[int], stop_ids: Sequence[int]) -> int:
    """How many of `tokens` there are up to and with a stop token."""
    return next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))


def _slots(draft: DraftModel | None) -> tuple[str, ...]:
    if draft is None:
        return ()
    if not draft.head.use_aux:
        return (NORM,)
    if draft.head.aux_ids is None:
        raise UsageError("the draft does not say which of the target's states it takes")
    return tuple(str(i) for i in draft.head.aux_ids)


def _cache(target: LoadedTarget) -> Any:
    """A cache that can forget tokens, or None where the target keeps a state that cannot (then it reads all again)."""
    from transformers import DynamicCache

    config = target.model.config.get_text_config()  # type: ignore[union-attr, operator]
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    # Without a configuration every layer keeps all keys; a sliding window is then the attention mask's.
    return DynamicCache() if kinds <= {"full_attention", "sliding_attention"} else None

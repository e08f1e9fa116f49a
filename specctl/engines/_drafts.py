"""From what a server tells of one text's drafts to a result. Pure functions.

Servers count drafts before the text is cut at its end, so their counts may tell of up to a draft of tokens more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from specctl.errors import MachineError
from specctl.records.evaluation import UNTOLD, DecodePlan, Prompt, PromptResult, Step, counted, told


def are_counts(values: Any) -> TypeGuard[list[int]]:
    """Whether a value of JSON is a list of whole numbers from 0."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def plain_result(plan: DecodePlan, prompt: Prompt, tokens: tuple[int, ...]) -> PromptResult:
    """A text without drafts: every token after the first took a step."""
    return told(prompt, tokens, (((), 0),) * (len(tokens) - 1), is_stopped=tokens[-1] in plan.stop_ids)


def gained_tokens(histogram: Sequence[int]) -> int:
    """The tokens of a text, its end not cut, from how many steps kept 0, 1, ... drafts."""
    return 1 + sum((kept + 1) * count for kept, count in enumerate(histogram))


def check_gained(gained: int, num_tokens: int, plan: DecodePlan, where: str) -> None:
    """Raises MachineError for drafts that would have made a longer text, and for those that made only a part of it.

    Servers tell no steps that verify no drafts, and how many such steps there were does not follow from the rest.
    """
    if gained > num_tokens + plan.num_draft_tokens:
        raise MachineError(f"the server tells of {gained} tokens for a text of {num_tokens}", where=where)
    if gained < num_tokens:
        raise MachineError(
            f"the server tells of {gained} tokens for a text of {num_tokens}: the others came without drafts",
            where=where,
            hint="servers do not draft after a pause for want of memory (a smaller `--batch`), nor past the draft's "
            "`max_position_embeddings` (shorter prompts)",
        )


def histogram_result(
    plan: DecodePlan, prompt: Prompt, tokens: tuple[int, ...], histogram: Sequence[int]
) -> PromptResult:
    """A text of which no more is told than how many steps kept 0, 1, ... drafts."""
    positions, steps = range(plan.num_draft_tokens), sum(histogram)
    return counted(
        prompt,
        tokens,
        steps,
        proposed=(steps,) * len(positions),
        accepted=tuple(sum(histogram[i + 1 :]) for i in positions),
        is_stopped=tokens[-1] in plan.stop_ids,
    )


def named_steps(tokens: Sequence[int], steps: Sequence[tuple[int, int]]) -> tuple[Step, ...]:
    """Steps of (drafted, accepted) with the ids that the text tells.

    An accepted draft stands in the text, unless that was cut before it; a refused one is told nowhere.
    """
    named: list[Step] = []
    at = 1
    for drafted, kept in steps:
        ids = tuple(tokens[at : at + kept])
        named.append((ids + (UNTOLD,) * (drafted - len(ids)), kept))
        at += kept + 1
    return tuple(named)

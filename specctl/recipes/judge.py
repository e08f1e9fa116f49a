"""From what was measured to tables, divergences and a verdict. Pure: no files, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from specctl.core import intervals
from specctl.errors import EXIT_YES, UsageError
from specctl.recipes.verdict import verdict
from specctl.records.evaluation import COMPARED, Baseline, Counts, EvalResult, PromptResult, SizeResult
from specctl.records.judgement import (
    EXIT_CODES,
    OUT,
    BaselineRow,
    CategoryRow,
    Divergence,
    Judgement,
    SizeRow,
)

_T = TypeVar("_T")
_Named: TypeAlias = tuple[str, SizeResult]
_Side: TypeAlias = tuple[str, SizeResult, _Named | None]
"""A size with its name, and what it is compared with."""

NEAR: Final[Mapping[str, float]] = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""Gap of the two best logits up to which rounding alone can swap them, by dtype.

Four steps of a 16-bit number between 16 and 32, where large logits lie; in float32 sums in another order
move a logit more than its last bit does. A fault swaps logits that lie far apart.
"""

FEW_PROMPTS: Final = 16


def judge(result: EvalResult, *, tolerance: float) -> Judgement:
    """Each size of a run against its first.

    Raises InputError when the sizes did not run the same prompts, UsageError for a tolerance below 0.
    """
    first = (size_name(result.sizes[0]), result.sizes[0])
    sides = [(*first, None), *((size_name(size), size, first) for size in result.sizes[1:])]
    return _judge(sides, result.baselines, result.settings, tolerance)


def compare(
    first: EvalResult, second: EvalResult, *, tolerance: float, names: tuple[str, str] = ("A", "B")
) -> Judgement:
    """Each size of `second` against the same size of `first`, or its first size where it has no such.

    Raises UsageError when settings differ that decide what the number is of, and naming each; InputError when
    prompts are missing.
    """
    refuse_differing(first, second, names=names)
    own = {(size.pp, size.tp): size for size in reversed(first.sizes)}
    pairs = [(size, own.get((size.pp, size.tp), first.sizes[0])) for size in second.sizes]
    compared = [size for size in first.sizes if any(size is other for _, other in pairs)]
    left, right = names
    sides: list[_Side] = [(f"{left} {size_name(size)}", size, None) for size in compared]
    sides += [(f"{right} {size_name(size)}", size, (f"{left} {size_name(other)}", other)) for size, other in pairs]
    found = _judge(sides, (), {**first.settings, "dtype": _coarser(first, second)}, tolerance)
    return replace(found, notes=(*_unknown(first, second, names), *found.notes))


def _unknown(first: EvalResult, second: EvalResult, names: tuple[str, str]) -> list[str]:
    """What a server did not say, so that nobody knows whether both results are of the same."""
    both, notes = (first.settings, second.settings), []
    if any(s.get("target_weights") is None for s in both) and both[0].get("target") != both[1].get("target"):
        targets = " and ".join(f"`{s.get('target')}`" for s in both)
        notes.append(f"whether {targets} are one target is not known: the weights of a server's were not read")
    silent = [name for name, s in zip(names, both, strict=True) if s.get("dtype") is None]
    if silent and both[0].get("dtype") != both[1].get("dtype"):
        notes.append(f"the dtype of {silent[0]} is not known, and may be another")
    return notes


def _coarser(first: EvalResult, second: EvalResult) -> str:
    """The dtype in which logits are the less exact; an unknown one where either is unknown."""
    return max((str(r.settings.get("dtype")) for r in (first, second)), key=lambda name: NEAR.get(name, math.inf))


def refuse_differing(first: EvalResult, second: EvalResult, *, names: tuple[str, str] = ("A", "B")) -> None:
    """Raises UsageError that names each setting of COMPARED in which two results differ."""
    a, b = first.settings, second.settings
    # The weights of a target that a server holds may be out of reach.
    is_unread = a.get("target_weights") is None or b.get("target_weights") is None
    keys = [key for key in COMPARED if key != "target_weights" or not is_unread]
    lines = [f"{key} is {a.get(key)!r} and {b.get(key)!r}" for key in keys if a.get(key) != b.get(key)]
    if lines:
        raise UsageError(
            f"results of other settings cannot be compared: {'; '.join(lines)}",
            where=f"{names[0]} and {names[1]}",
            hint="measure both with the same settings",
        )


def size_name(size: SizeResult) -> str:
    """As tables name a size."""
    return f"PP {size.pp}" if size.tp == 1 else f"PP {size.pp} x TP {size.tp}"


def _judge(
    sides: Sequence[_Side], replayed: Sequence[Baseline], settings: Mapping[str, Any], tolerance: float
) -> Judgement:
    rows: list[SizeRow] = []
    divergences: list[Divergence] = []
    for name, size, against in sides:
        row = _row(size, name, settings)
        if against is not None:
            row = _compared(row, size, against, tolerance, drafts=not settings.get("no_spec"))
            divergences += _divergences((name, size), against, settings)
        rows.append(row)
    baselines = tuple(_baseline_row(b, sides[0][1]) for b in replayed)
    outcome, needed, sentence = verdict(rows, tolerance)
    strange = [found for found in divergences if found.is_near is False]
    if strange:
        outcome, needed = OUT, None
        names = f"{strange[0].size} writes another text than {strange[0].against}"
        sentence = f"{names}, from a token on that rounding cannot explain: a fault"
    return Judgement(
        rows=tuple(rows),
        baselines=baselines,
        divergences=tuple(divergences),
        tolerance=tolerance,
        outcome=outcome,
        prompts_needed=needed,
        sentence=sentence,
        exit_code=EXIT_YES if outcome is None else EXIT_CODES[outcome],
        notes=tuple(_notes(rows, baselines)),
    )


def _row(size: SizeResult, name: str, settings: Mapping[str, Any]) -> SizeRow:
    prompts = list(intervals.by_prompt(size.results).values())
    whole = intervals.add(prompts)
    width = settings.get("num_draft_tokens")
    width = width if isinstance(width, int) and not settings.get("no_spec") else 0
    plain_tokens = whole.tokens if size.plain_tokens is None else size.plain_tokens
    speed, plain_speed = _rate(whole.tokens, size.seconds), _rate(plain_tokens, size.plain_seconds)
    return SizeRow(
        name=name,
        pp=size.pp,
        tp=size.tp,
        prompts=len(prompts),
        steps=whole.steps,
        drafts=whole.num_drafts,
        length=intervals.acceptance_length(prompts),
        macro_mean=intervals.macro_mean([r.counts() for r in size.results]),
        tokens_per_step=intervals.tokens_per_step(whole),
        joint_rates=_padded(intervals.joint_rates(whole), width),
        conditional_rates=_padded(intervals.conditional_rates(whole), width),
        tokens=whole.tokens,
        tokens_per_second=speed,
        plain_tokens_per_second=plain_speed,
        speed_up=speed / plain_speed if speed and plain_speed else None,
        bytes_per_token=None if size.bytes_on_wire is None else _rate(size.bytes_on_wire, whole.tokens),
        categories=_categories(size.results),
        lengths=tuple(value for value in map(intervals.length, prompts) if value is not None),
    )


def _compared(row: SizeRow, size: SizeResult, against: _Named, tolerance: float, *, drafts: bool) -> SizeRow:
    name, other = against
    found = intervals.difference(intervals.pair(other.results, size.results, names=(name, row.name)))
    decision = intervals.decide(found, tolerance) if drafts else None
    return replace(row, against=name, difference=found, decision=decision)


def _rate(amount: float, by: float | None) -> float | None:
    return amount / by if by else None


def _padded(rates: tuple[float | None, ...], width: int) -> tuple[float | None, ...]:
    """Up to position K: one that was never proposed is there, and has no rate."""
    return rates + (None,) * (width - len(rates))


def _categories(results: Sequence[PromptResult]) -> tuple[CategoryRow, ...]:
    """In order of first appearance; none where no prompt has one."""
    names = dict.fromkeys(r.category for r in results)
    if set(names) <= {None}:
        return ()
    rows = []
    for name in names:
        prompts = list(intervals.by_prompt([r for r in results if r.category == name]).values())
        steps = intervals.tokens_per_step(intervals.add(prompts))
        rows.append(CategoryRow(name or "none", intervals.acceptance_length(prompts), steps))
    return tuple(rows)


def _baseline_row(baseline: Baseline, first: SizeResult) -> BaselineRow:
    turns: dict[str, list[Counts]] = {}
    for i, counts in enumerate(baseline.results):
        # One entry per text of the first size; a file that says otherwise is read as one prompt per text.
        turns.setdefault(first.results[i].id if i < len(first.results) else str(i), []).append(counts)
    prompts = [intervals.add(counts) for counts in turns.values()]
    whole = intervals.add(prompts)
    return BaselineRow(
        name=baseline.name,
        length=intervals.acceptance_length(prompts),
        tokens_per_step=intervals.tokens_per_step(whole),
        drafted_share=_rate(whole.num_drafts, whole.steps),
    )


def _divergences(named: _Named, against: _Named, settings: Mapping[str, Any]) -> list[Divergence]:
    if settings.get("temperature", 0):
        return []
    (name, size), (other_name, other) = named, against
    theirs = {(r.id, r.turn): r for r in other.results}
    near = NEAR.get(str(settings.get("dtype")))
    found = (_divergence(r, theirs[r.id, r.turn], (name, other_name), near) for r in size.results)
    return [divergence for divergence in found if divergence is not None]


def _divergence(
    result: PromptResult, other: PromptResult, names: tuple[str, str], near: float | None
) -> Divergence | None:
    # After an earlier turn diverged the next one starts from another text: that is no new divergence.
    if result.tokens == other.tokens or result.prompt_ids != other.prompt_ids:
        return None
    pairs = zip(result.tokens, other.tokens, strict=False)
    shorter = min(len(result.tokens), len(other.tokens))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    gaps = [_at(r.gaps or (), index) for r in (result, other)]
    known = [gap for gap in gaps if gap is not None]
    return Divergence(
        id=result.id,
        turn=result.turn,
        size=names[0],
        against=names[1],
        index=index,
        token=_at(result.tokens, index),
        other_token=_at(other.tokens, index),
        gap=gaps[0],
        other_gap=gaps[1],
        is_near=None if near is None or not known else max(known) <= near,
    )


def _at(values: Sequence[_T], index: int) -> _T | None:
    return values[index] if index < len(values) else None


def _notes(rows: Sequence[SizeRow], baselines: Sequence[BaselineRow]) -> list[str]:
    """What a reader of the numbers has to know beside them."""
    notes = []
    few = min((row.prompts for row in rows), default=0)
    if 0 < few < FEW_PROMPTS:
        notes.append(f"{few} prompts are few: one that goes another way moves the mean by much")
    mine = rows[0].tokens_per_step if rows and rows[0].drafts else None
    for row in baselines:
        if mine is not None and row.tokens_per_step is not None and row.tokens_per_step >= mine:
            notes.append(
                f"{row.name} gives {row.tokens_per_step:.2f} tokens per step without a draft, the draft {mine:.2f}"
            )
    return notes

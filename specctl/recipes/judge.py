"""From what was measured to tables, divergences and a verdict. Pure: no files, no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, TypeVar

from specctl.core import intervals
from specctl.errors import EXIT_YES, UsageError
from specctl.records.evaluation import COMPARED, Baseline, Counts, EvalResult, PromptResult, SizeResult
from specctl.records.judgement import (
    EXIT_CODES,
    OUT,
    UNDECIDED,
    WITHIN,
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
    return _judge(sides, (), {**first.settings, "dtype": _coarser(first, second)}, tolerance)


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
    outcome, needed, sentence = _verdict(rows, tolerance)
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


def _verdict(rows: Sequence[SizeRow], tolerance: float) -> tuple[str | None, int | None, str]:
    """The outcome of the worst row, the prompts that would tell, and both in a sentence."""
    judged = [(row, row.decision) for row in rows if row.decision is not None]
    if not judged:
        return None, None, "nothing was compared"
    for outcome, sentence in ((OUT, _out), (UNDECIDED, _undecided)):
        bad = [(row, decision.prompts_needed) for row, decision in judged if decision.outcome == outcome]
        if bad:
            needed = [n for _, n in bad if n is not None]
            return outcome, max(needed, default=None), sentence(bad, tolerance)
    worst = max((row for row, _ in judged), key=lambda row: abs(_relative(row)))
    return WITHIN, None, f"within the tolerance of {percent(tolerance)}: {_shown(worst)}"


def _out(bad: Sequence[tuple[SizeRow, int | None]], tolerance: float) -> str:
    worst = max((row for row, _ in bad), key=lambda row: abs(_relative(row)))
    return f"out of the tolerance of {percent(tolerance)}: {_shown(worst)}"


def _undecided(bad: Sequence[tuple[SizeRow, int | None]], tolerance: float) -> str:
    row, needed = max(bad, key=lambda item: item[1] or 0)
    asked = f"cannot tell whether {row.name} is within {percent(tolerance)} of {row.against}"
    if row.difference is None or row.difference.relative is None:
        return f"{asked}: nothing was drafted"
    if row.difference.relative_low is None:
        return f"{asked}: one prompt gives no interval"
    wanted = "no number of prompts that is worth running" if needed is None else f"at least {needed:,} prompts"
    return f"{asked}: {_shown(row)}; {wanted} would tell, were the difference to stay as it is"


def _relative(row: SizeRow) -> float:
    return (row.difference.relative if row.difference else None) or 0.0


def _shown(row: SizeRow) -> str:
    found = row.difference
    if found is None or found.relative is None or found.relative_low is None or found.relative_high is None:
        return f"{row.name} was not compared"
    ends = f"{percent(found.relative_low, signed=True)} to {percent(found.relative_high, signed=True)}"
    return f"{row.name} differs from {row.against} by {percent(found.relative, signed=True)} (95 % interval {ends})"


def percent(share: float, *, signed: bool = False) -> str:
    """A share as per cent, with as many places as tell it from its neighbours."""
    return f"{100 * share:+.1f} %" if signed else f"{100 * share:.3g} %"


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

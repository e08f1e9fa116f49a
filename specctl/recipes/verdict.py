"""What sizes that were compared come to, in one word and in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.records.judgement import OUT, UNDECIDED, WITHIN, SizeRow


def verdict(rows: Sequence[SizeRow], tolerance: float) -> tuple[str | None, int | None, str]:
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

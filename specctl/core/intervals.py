"""Acceptance length with an interval, the paired difference of two sizes, and what it decides. No torch.

The sample is the prompt, never the step: the steps of a prompt accept alike (an easy text stays easy), so an
interval over steps is too narrow, by a factor of two and more. All turns of a prompt are one sample.

Spreads are those of the delta method, each prompt's share taken by leaving it out (Tukey's jackknife, which for
a ratio is the delta method corrected for prompts that weigh much), with Student's t. The interval of an
acceptance length is made on the log-odds of the accepted share and carried back: rates are skewed, and the ends
stay between 1 and 1 + K. tests/test_intervals.py measures how often both hold the truth.
Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 11 and 22; Abramowitz and Stegun
26.7.3, 26.7.4 and 26.7.5 for t.
"""

import math
from collections.abc import Sequence
from itertools import zip_longest
from statistics import NormalDist
from typing import Final

from specctl.errors import InputError, UsageError
from specctl.records.evaluation import Counts, PromptResult
from specctl.records.judgement import OUT, UNDECIDED, WITHIN, Decision, Difference, Estimate

CONFIDENCE: Final = 0.95

_SERIES_TO: Final = 100
"""Degrees of freedom up to which t's finite series is summed; beyond, three terms in 1/df are exact to 1e-7."""

_TOO_NEAR: Final = 1e-6
"""A difference this near the tolerance is decided by no number of prompts that anyone runs."""


def add(counts: Sequence[Counts]) -> Counts:
    """The counts of several texts together; drafts of other lengths fill missing positions with 0."""

    def positions(name: str) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*(getattr(c, name) for c in counts), fillvalue=0)))

    return Counts(
        texts=sum(c.texts for c in counts),
        tokens=sum(c.tokens for c in counts),
        steps=sum(c.steps for c in counts),
        num_drafts=sum(c.num_drafts for c in counts),
        proposed=positions("proposed"),
        reached=positions("reached"),
        accepted=positions("accepted"),
    )


def by_prompt(results: Sequence[PromptResult]) -> dict[str, Counts]:
    """The counts of each prompt, all its turns together, in order of first appearance."""
    turns: dict[str, list[Counts]] = {}
    for result in results:
        turns.setdefault(result.id, []).append(result.counts())
    return {name: add(counts) for name, counts in turns.items()}


def length(counts: Counts) -> float | None:
    """1 + accepted / drafts: tokens of a step that verified a draft, the target's own one included.

    None where nothing was drafted. Source: vLLM's spec-decode metrics.
    """
    return 1 + sum(counts.accepted) / counts.num_drafts if counts.num_drafts else None


def acceptance_length(prompts: Sequence[Counts]) -> Estimate:
    """The ratio of sums over prompts (the field's micro average) and its 95 % interval."""
    whole = add(prompts)
    value = length(whole)
    spread = None if value is None else _spread([length(c) for c in _each_left_out(prompts, whole)], value)
    if value is None or spread is None:
        return Estimate(value, None, None, len(prompts))
    low, high = _on_log_odds(value - 1, spread * student_t(len(prompts) - 1), sum(whole.proposed) / whole.num_drafts)
    return Estimate(value, 1 + low, 1 + high, len(prompts))


def macro_mean(texts: Sequence[Counts]) -> float | None:
    """The mean of each text's acceptance length, whatever its number of drafts; None where none was drafted."""
    values = [value for value in map(length, texts) if value is not None]
    return sum(values) / len(values) if values else None


def tokens_per_step(counts: Counts) -> float | None:
    """New tokens, cut at a stop, by step of the target; plain decoding has 1. None without a step.

    The first token of a text comes with its prompt and is no step's: counting it would add 1 / steps.
    """
    return (counts.tokens - counts.texts) / counts.steps if counts.steps else None


def joint_rates(counts: Counts) -> tuple[float | None, ...]:
    """Per position, the share of all drafts that were kept up to it; None where none was proposed."""
    return tuple(
        accepted / counts.num_drafts if proposed else None
        for accepted, proposed in zip(counts.accepted, counts.proposed, strict=True)
    )


def conditional_rates(counts: Counts) -> tuple[float | None, ...]:
    """Per position, the share kept of those drafts that were kept up to it; None where none came that far."""
    return tuple(
        accepted / reached if reached else None
        for accepted, reached in zip(counts.accepted, counts.reached, strict=True)
    )


def pair(
    first: Sequence[PromptResult], second: Sequence[PromptResult], *, names: tuple[str, str]
) -> list[tuple[Counts, Counts]]:
    """The prompts of two sizes side by side. Raises InputError when a turn is missing, or starts from other tokens."""
    mine, theirs = ({(r.id, r.turn): r for r in results} for results in (first, second))
    for have, other, name in ((mine, theirs, names[1]), (theirs, mine, names[0])):
        missing = [f"`{key[0]}` turn {key[1]}" for key in have if key not in other]
        if missing:
            raise InputError(f"{len(missing)} of {len(have)} turns are missing, first {missing[0]}", where=name)
    # A later turn holds the answer before it, which may differ; the first turn is the prompt's own.
    start = min((turn for _, turn in mine), default=0)
    changed = [k for k, r in mine.items() if k[1] == start and r.prompt_ids != theirs[k].prompt_ids]
    if changed:
        raise InputError(
            f"prompt `{changed[0][0]}` has other tokens than in {names[0]}",
            where=names[1],
            hint="use the same prompts, tokenizer and chat template for both",
        )
    left, right = by_prompt(first), by_prompt(second)
    return [(left[name], right[name]) for name in left]


def difference(pairs: Sequence[tuple[Counts, Counts]]) -> Difference:
    """Second less first over prompts that both had, with the interval of the paired difference."""
    count = len(pairs)
    wholes = [add([p[side] for p in pairs]) for side in (0, 1)]
    first, second = length(wholes[0]), length(wholes[1])
    if first is None or second is None:
        return Difference(count)
    value, relative = second - first, second / first - 1
    if all(a.num_drafts == b.num_drafts and sum(a.accepted) == sum(b.accepted) for a, b in pairs):
        return Difference(count, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    rest = zip(*(_each_left_out([p[side] for p in pairs], wholes[side]) for side in (0, 1)), strict=True)
    lengths = [(length(a), length(b)) for a, b in rest]
    spread = _spread([None if a is None or b is None else b - a for a, b in lengths], value)
    relative_spread = _spread([None if a is None or b is None else b / a - 1 for a, b in lengths], relative)
    if spread is None or relative_spread is None:
        return Difference(count, value, relative=relative)
    t = student_t(count - 1)
    return Difference(
        prompts=count,
        value=value,
        low=value - t * spread,
        high=value + t * spread,
        relative=relative,
        relative_low=relative - t * relative_spread,
        relative_high=relative + t * relative_spread,
        spread=relative_spread,
    )


def decide(found: Difference, tolerance: float) -> Decision:
    """What the interval of the relative difference says against +-`tolerance`. Raises UsageError below 0.

    Within when all of it lies inside, out when all of it lies outside. Several sizes need no correction: all
    must be within, and that is no likelier by chance for being asked of each.
    """
    if not tolerance >= 0:
        raise UsageError(f"expected a tolerance of at least 0 and found {tolerance}")
    low, high = found.relative_low, found.relative_high
    if low is None or high is None:
        return Decision(UNDECIDED)
    if -tolerance <= low and high <= tolerance:
        return Decision(WITHIN)
    if low > tolerance or high < -tolerance:
        return Decision(OUT)
    return Decision(UNDECIDED, _prompts_needed(found, tolerance))


def student_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The half-width, in standard errors, of a central interval with this many degrees of freedom (1 or more)."""
    if freedom > _SERIES_TO:
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + first / freedom + second / freedom**2
    low, high = 0.0, math.pi / 2
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _central_share(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _central_share(angle: float, freedom: int) -> float:
    """The share of Student's t within +-sqrt(freedom) * tan(angle), by the finite series."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for j in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (j - 1) / j
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _each_left_out(prompts: Sequence[Counts], whole: Counts) -> list[Counts]:
    """What is left of `whole` without each prompt in turn; only what a length is made of."""
    accepted = sum(whole.accepted)
    return [Counts(0, 0, 0, whole.num_drafts - c.num_drafts, (), (), (accepted - sum(c.accepted),)) for c in prompts]


def _spread(without: Sequence[float | None], whole: float) -> float | None:
    """The standard error of `whole` from its values without each prompt; None where those do not exist."""
    values = [v for v in without if v is not None]
    count = len(values)
    if count < 2 or count < len(without):
        return None
    return math.sqrt((count - 1) / count * sum((v - whole) ** 2 for v in values))


def _on_log_odds(value: float, half: float, most: float) -> tuple[float, float]:
    """The interval of `value`, of 0 to `most`, whose half-width on the plain scale would be `half`."""
    if not half or not 0 < value < most:
        return value, value
    share = value / most
    centre, reach = math.log(share / (1 - share)), half / (most * share * (1 - share))
    return most * _share(centre - reach), most * _share(centre + reach)


def _share(log_odds: float) -> float:
    # The exponent is kept negative: the other one overflows for intervals that say nothing.
    small = math.exp(-abs(log_odds))
    return (1 if log_odds > 0 else small) / (1 + small)


def _prompts_needed(found: Difference, tolerance: float) -> int | None:
    """How many prompts like these would decide, were the difference to stay as it is."""
    margin = abs(abs(found.relative or 0.0) - tolerance)
    if margin < _TOO_NEAR or not found.spread:
        return None
    deviation = found.spread * math.sqrt(found.prompts)
    needed = max(found.prompts + 1, math.ceil((NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * deviation / margin) ** 2))
    while student_t(needed - 1) * deviation > margin * math.sqrt(needed):
        needed += 1
    return needed

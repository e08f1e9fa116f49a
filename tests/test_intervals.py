"""Acceptance lengths, intervals and verdicts: by hand, at the edges, and how often an interval holds the truth."""

import re

import numpy as np
import pytest
from conftest import ROOT

from specctl.core import intervals
from specctl.errors import InputError, UsageError
from specctl.records.evaluation import Counts, PromptResult, Step, count_steps
from specctl.records.judgement import Difference


def counts(accepted: int, drafts: int, width: int = 4) -> Counts:
    """A text in which `drafts` drafts of `width` tokens kept `accepted` in all; positions as they fall."""
    full, rest = divmod(accepted, drafts) if drafts else (0, 0)
    kept = tuple(drafts if i < full else rest if i == full else 0 for i in range(width))
    return Counts(1, accepted + drafts + 1, drafts, drafts, (drafts,) * width, (drafts, *kept[:-1]), kept)


def result(name: str, steps: list[Step], *, turn: int = 0, prompt: tuple[int, ...] = (1, 2)) -> PromptResult:
    tokens = tuple(range(1 + sum(kept + 1 for _, kept in steps)))
    c = count_steps(steps, num_tokens=len(tokens))
    return PromptResult(
        name, None, turn, prompt, tokens, c.num_drafts, c.proposed, c.accepted, tuple(steps), "length", None
    )


def kept(*accepted: int, width: int = 3) -> list[Step]:
    return [(tuple(range(width)), n) for n in accepted]


# By hand.


def test_the_bonus_token_is_counted_and_rates_are_joint_and_conditional() -> None:
    c = result("a", kept(3, 0, 2, 1)).counts()
    assert intervals.length(c) == 2.5
    assert intervals.joint_rates(c) == (0.75, 0.5, 0.25)
    assert intervals.conditional_rates(c) == (3 / 4, 2 / 3, 1 / 2)
    # The same from a server's counters: drafts 4, drafted tokens 12, accepted tokens 6.
    assert (c.num_drafts, sum(c.proposed), sum(c.accepted)) == (4, 12, 6)


def test_the_headline_is_the_ratio_of_sums_and_the_macro_mean_is_another_number() -> None:
    requests = [counts(2, 1), counts(10, 100)]
    assert intervals.acceptance_length(requests).value == pytest.approx(1 + 12 / 101)
    assert intervals.macro_mean(requests) == pytest.approx(2.05)


def test_a_position_that_was_never_proposed_has_no_rate_and_a_shorter_draft_does_not_lower_it() -> None:
    steps = [((1, 2), 2), ((1, 2, 3), 2), ((1,), 1)]
    c = count_steps(steps, num_tokens=9)
    assert (c.proposed, c.reached, c.accepted) == ((3, 2, 1), (3, 2, 1), (3, 2, 0))
    assert intervals.joint_rates(c) == (1.0, 2 / 3, 0.0)
    assert intervals.conditional_rates(c) == (1.0, 1.0, 0.0)
    two_only = Counts(1, 9, 4, 4, (4, 4, 0), (4, 3, 0), (3, 1, 0))
    assert intervals.joint_rates(two_only) == (0.75, 0.25, None)
    assert intervals.conditional_rates(two_only) == (0.75, 1 / 3, None)


def test_tokens_per_step_leaves_out_the_token_of_the_prompt_and_is_one_without_a_draft() -> None:
    plain = count_steps([((), 0)] * 9, num_tokens=10)
    assert intervals.tokens_per_step(plain) == 1
    assert intervals.length(plain) is None
    uncut = result("a", kept(3, 0, 2, 1)).counts()
    assert intervals.tokens_per_step(uncut) == intervals.length(uncut) == 2.5
    cut = count_steps(kept(3, 0, 2, 1), num_tokens=9)
    assert (intervals.tokens_per_step(cut), intervals.length(cut)) == (2.0, 2.5)


@pytest.mark.parametrize(
    ("freedom", "wanted"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (15, 2.1314), (63, 1.9983), (100, 1.9840), (101, 1.9837)],
)
def test_student_t_is_that_of_the_tables(freedom: int, wanted: float) -> None:
    assert intervals.student_t(freedom) == pytest.approx(wanted, abs=6e-5)


def test_student_t_becomes_the_normal_one() -> None:
    assert intervals.student_t(1_000_000) == pytest.approx(1.959966, abs=1e-6)
    assert intervals.student_t(9, confidence=0.9) == pytest.approx(1.8331, abs=6e-5)


def test_an_interval_by_hand() -> None:
    # Three prompts of 10 drafts, 10, 15 and 20 of 40 tokens kept: 1.5 a draft, without one 1.75, 1.5 and 1.25.
    # Spread sqrt(2/3 * 2 * 0.25 ** 2) = 0.288675; t(2) = 4.302653; half 1.242069 on the plain scale.
    # Share 0.375 of 4, log-odds -0.510826, reach 1.242069 / (4 * 0.375 * 0.625) = 1.324874.
    found = intervals.acceptance_length([counts(10, 10), counts(15, 10), counts(20, 10)])
    assert (found.value, found.prompts) == (2.5, 3)
    assert found.low == pytest.approx(1.550243, abs=1e-5)
    assert found.high == pytest.approx(3.771884, abs=1e-5)


def test_a_paired_difference_by_hand() -> None:
    # Lengths 2, 2, 2 and 2, 1.8, 1.6: differences of 10 drafts each, 0, -0.2, -0.4; mean -0.2.
    pairs = [(counts(10, 10), counts(a, 10)) for a in (10, 8, 6)]
    found = intervals.difference(pairs)
    # Without one: -0.3, -0.2, -0.1; spread sqrt(2/3 * 0.02) = 0.1154701; t(2) = 4.302653.
    assert found.value == pytest.approx(-0.2)
    assert found.low == pytest.approx(-0.2 - 4.302653 * 0.1154701, abs=1e-5)
    assert found.high == pytest.approx(-0.2 + 4.302653 * 0.1154701, abs=1e-5)
    assert found.relative == pytest.approx(-0.1)
    assert found.spread == pytest.approx(0.1154701 / 2)
    assert found.relative_low == pytest.approx((found.low or 0) / 2)


# Edges.


def test_one_prompt_has_a_value_and_no_interval() -> None:
    found = intervals.acceptance_length([counts(10, 10)])
    assert (found.value, found.low, found.high, found.prompts) == (2.0, None, None, 1)


def test_without_a_draft_there_is_no_acceptance_length() -> None:
    nothing = [count_steps([((), 0)], num_tokens=2)] * 3
    assert intervals.acceptance_length(nothing).value is None
    assert intervals.acceptance_length([]).value is None
    assert intervals.macro_mean(nothing) is None
    assert intervals.tokens_per_step(count_steps([], num_tokens=1)) is None
    found = intervals.difference([(counts(4, 4), nothing[0])])
    assert (found.value, found.relative) == (None, None)
    assert intervals.decide(found, 0.05).outcome == "undecided"


def test_a_prompt_that_carries_every_draft_gives_no_interval() -> None:
    found = intervals.acceptance_length([counts(10, 10), count_steps([((), 0)], num_tokens=2)])
    assert (found.value, found.low) == (2.0, None)


@pytest.mark.parametrize("each", [0, 40])
def test_all_or_nothing_accepted_ends_at_the_ends(each: int) -> None:
    found = intervals.acceptance_length([counts(each, 10)] * 4)
    assert found.low == found.value == found.high == 1 + each / 10


def test_an_interval_stays_within_what_is_possible() -> None:
    found = intervals.acceptance_length([counts(0, 10), counts(39, 10)])
    assert found.low is not None and found.high is not None
    assert 1 <= found.low < 2.95 < found.high <= 5


def test_turns_of_a_prompt_are_one_sample() -> None:
    turns = [result("a", kept(3, 3)), result("a", kept(0, 0), turn=1), result("b", kept(1, 1))]
    prompts = intervals.by_prompt(turns)
    assert list(prompts) == ["a", "b"]
    assert (prompts["a"].texts, prompts["a"].num_drafts, prompts["a"].accepted) == (2, 4, (2, 2, 2))
    assert intervals.acceptance_length(list(prompts.values())).prompts == 2


def test_drafts_of_other_lengths_are_added_position_by_position() -> None:
    both = intervals.add([result("a", kept(1, width=2)).counts(), result("b", kept(4, width=4)).counts()])
    assert (both.proposed, both.reached, both.accepted) == ((2, 2, 1, 1), (2, 2, 1, 1), (2, 1, 1, 1))


def test_identical_runs_differ_by_nothing_for_certain() -> None:
    for prompts in ([counts(7, 5)], [counts(7, 5), counts(3, 9)]):
        found = intervals.difference([(c, c) for c in prompts])
        assert (found.value, found.low, found.high, found.relative_low, found.relative_high) == (0, 0, 0, 0, 0)
        assert intervals.decide(found, 0.0).outcome == "within"


def test_one_prompt_that_changed_is_undecided_without_a_number() -> None:
    decision = intervals.decide(intervals.difference([(counts(7, 5), counts(6, 5))]), 0.05)
    assert (decision.outcome, decision.prompts_needed, decision.exit_code) == ("undecided", None, 3)


def test_prompts_are_paired_by_id_and_turn_in_any_order() -> None:
    first = [result("a", kept(3)), result("b", kept(1))]
    second = [result("b", kept(0)), result("a", kept(2))]
    pairs = intervals.pair(first, second, names=("x", "y"))
    assert [(sum(a.accepted), sum(b.accepted)) for a, b in pairs] == [(3, 2), (1, 0)]


def test_a_prompt_that_one_side_lacks_is_refused_by_name() -> None:
    first = [result("a", kept(3)), result("b", kept(1))]
    for left, right, where in ((first, first[:1], "y"), (first[:1], first, "x")):
        with pytest.raises(InputError, match="first `b` turn 0") as caught:
            intervals.pair(left, right, names=("x", "y"))
        assert caught.value.where == where


def test_a_prompt_of_other_tokens_is_refused_and_a_later_turn_after_another_answer_is_not() -> None:
    first = [result("a", kept(3)), result("a", kept(1), turn=1, prompt=(1, 2, 3))]
    second = [result("a", kept(3)), result("a", kept(1), turn=1, prompt=(1, 2, 4))]
    assert len(intervals.pair(first, second, names=("x", "y"))) == 1
    with pytest.raises(InputError, match="`a` has other tokens than in x"):
        intervals.pair(first, [result("a", kept(3), prompt=(9,)), second[1]], names=("x", "y"))


# Verdicts.


@pytest.mark.parametrize(
    ("low", "high", "outcome", "code"),
    [
        (-0.05, 0.05, "within", 0),
        (-0.02, 0.01, "within", 0),
        (-0.06, 0.01, "undecided", 3),
        (-0.2, 0.2, "undecided", 3),
        (0.04, 0.07, "undecided", 3),
        (0.051, 0.2, "out", 1),
        (-0.3, -0.06, "out", 1),
    ],
)
def test_the_whole_interval_decides(low: float, high: float, outcome: str, code: int) -> None:
    middle = (low + high) / 2
    found = Difference(16, middle, low, high, middle, low, high, (high - middle) / intervals.student_t(15))
    decision = intervals.decide(found, 0.05)
    assert (decision.outcome, decision.exit_code) == (outcome, code)
    assert (decision.prompts_needed is None) == (outcome != "undecided")


def test_the_prompts_that_would_tell_are_the_fewest_that_would() -> None:
    spread = 0.02
    found = Difference(16, 0.01, relative=0.01, relative_low=-0.03, relative_high=0.06, spread=spread)
    needed = intervals.decide(found, 0.05).prompts_needed
    assert needed is not None

    def half(prompts: int) -> float:
        return intervals.student_t(prompts - 1) * spread * (16 / prompts) ** 0.5

    assert half(needed) <= 0.04 < half(needed - 1)


@pytest.mark.parametrize(("relative", "spread"), [(0.05, 0.1), (0.05 + 1e-9, 0.1), (-0.05, 0.1)])
def test_a_difference_at_the_tolerance_is_decided_by_no_number(relative: float, spread: float) -> None:
    found = Difference(16, relative, relative=relative, relative_low=-0.5, relative_high=0.5, spread=spread)
    assert intervals.decide(found, 0.05).prompts_needed is None


@pytest.mark.parametrize("tolerance", [-0.1, float("nan")])
def test_a_tolerance_below_zero_is_refused(tolerance: float) -> None:
    with pytest.raises(UsageError, match="at least 0"):
        intervals.decide(Difference(2), tolerance)


def lengths_of(*lengths: float) -> list[Counts]:
    return [counts(round((value - 1) * 10), 10) for value in lengths]


def test_four_prompts_of_which_one_went_another_way_cannot_tell() -> None:
    first, second = lengths_of(2.9, 1.5, 1.6, 2.2), lengths_of(1.4, 1.5, 1.6, 2.2)
    found = intervals.difference(list(zip(first, second, strict=True)))
    assert found.relative == pytest.approx(-1.5 / 8.2)
    decision = intervals.decide(found, 0.05)
    assert (decision.outcome, decision.exit_code) == ("undecided", 3)
    assert decision.prompts_needed is not None and decision.prompts_needed > 16


def test_sixteen_prompts_of_which_one_moved_a_little_are_within() -> None:
    first = lengths_of(2.9, 1.5, 1.6, 2.2) * 4
    second = [*lengths_of(2.5), *first[1:]]
    found = intervals.difference(list(zip(first, second, strict=True)))
    assert found.relative == pytest.approx(-0.4 / 32.8)
    assert intervals.decide(found, 0.05).outcome == "within"


# How often an interval holds the truth. A prompt has a rate of its own, so its steps accept alike.

WIDTH = 4


def truth(a: float, b: float, scale: float = 1.0) -> float:
    """The acceptance length of prompts whose rate is `scale` times a Beta(a, b) one, from its moments."""
    total, moment = 1.0, 1.0
    for k in range(WIDTH):
        moment *= scale * (a + k) / (a + b + k)
        total += moment
    return total


def accepted(rng: np.random.Generator, rates: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Accepted tokens, summed over so many steps, for each rate; int64 in the shape of both."""
    total = np.zeros_like(steps)
    for i in range(steps.max()):
        run = np.minimum(rng.geometric(1 - np.minimum(rates, 0.9999)) - 1, WIDTH)
        total += np.where(i < steps, run, 0)
    return total


def light(kept: int, drafts: int) -> Counts:
    return Counts(1, 0, 0, int(drafts), (int(drafts),) * WIDTH, (), (int(kept),))


SHAPES = [(8, 8, 40, 41), (2, 2, 20, 60), (2, 2, 5, 120), (0.5, 0.5, 20, 60), (3, 6, 10, 60)]


@pytest.mark.parametrize("prompts", [16, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_19_of_20_intervals_hold_the_true_acceptance_length(prompts: int, shape: tuple[float, float, int, int]) -> None:
    a, b, fewest, most = shape
    rng = np.random.default_rng(prompts)
    repeats = 1200
    steps = rng.integers(fewest, most, (repeats, prompts))
    sums = accepted(rng, rng.beta(a, b, steps.shape), steps)
    held, wanted = 0, truth(a, b)
    for row_kept, row_steps in zip(sums, steps, strict=True):
        found = intervals.acceptance_length([light(k, n) for k, n in zip(row_kept, row_steps, strict=True)])
        held += found.low <= wanted <= found.high
    assert 0.93 <= held / repeats <= 0.97


@pytest.mark.parametrize("prompts", [16, 64])
@pytest.mark.parametrize("scale", [1.0, 0.9])
def test_19_of_20_intervals_hold_the_true_difference(prompts: int, scale: float) -> None:
    rng = np.random.default_rng(prompts)
    repeats = 1200
    steps = rng.integers(20, 60, (repeats, prompts))
    rates = rng.beta(2, 2, steps.shape)
    first, second = accepted(rng, rates, steps), accepted(rng, scale * rates, steps)
    wanted, held = truth(2, 2, scale) / truth(2, 2) - 1, 0
    for left, right, row in zip(first, second, steps, strict=True):
        pairs = [(light(x, n), light(y, n)) for x, y, n in zip(left, right, row, strict=True)]
        found = intervals.difference(pairs)
        held += found.relative_low <= wanted <= found.relative_high
    assert 0.93 <= held / repeats <= 0.97


def test_an_interval_over_steps_would_be_much_too_narrow() -> None:
    rng = np.random.default_rng(0)
    steps = np.full((400, 16), 40)
    rates = rng.beta(2, 2, steps.shape)
    runs = np.stack([np.minimum(rng.geometric(1 - np.minimum(rates, 0.9999)) - 1, WIDTH) for _ in range(40)], -1)
    flat = runs.reshape(400, -1)
    half = 1.96 * flat.std(1, ddof=1) / flat.shape[1] ** 0.5
    assert (np.abs(1 + flat.mean(1) - truth(2, 2)) <= half).mean() < 0.65


# The table of docs/acceptance.md.


def texts(rng: np.random.Generator, rates: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Accepted tokens and drafts of texts of `tokens` new tokens, for each rate."""
    made, kept, drafts = (np.zeros(rates.shape, int) for _ in range(3))
    while (live := made < tokens).any():
        run = np.minimum(rng.geometric(1 - np.minimum(rates, 0.9999)) - 1, WIDTH)
        kept += np.where(live, run, 0)
        drafts += live
        made += np.where(live, run + 1, 0)
    return kept, drafts


def half_width(prompts: int, tokens: int, repeats: int = 200) -> float:
    """The median half-width of the interval, relative to its value, of prompts with Beta(4, 4) rates."""
    rng = np.random.default_rng(0)
    kept, drafts = texts(rng, rng.beta(4, 4, (repeats, prompts)), tokens)
    found = [
        intervals.acceptance_length([light(k, n) for k, n in zip(*row, strict=True)])
        for row in zip(kept, drafts, strict=True)
    ]
    return float(np.median([(e.high - e.low) / 2 / e.value for e in found]))


def paired_half_width(prompts: int, tokens: int, repeats: int = 200) -> float:
    """The same of the paired difference, when every second text becomes another text from a place in it on."""
    rng = np.random.default_rng(0)
    rates = rng.beta(4, 4, (repeats, prompts))
    place = np.where(rng.random(rates.shape) < 0.5, rng.random(rates.shape), 1.0)
    same, same_drafts = texts(rng, rates, tokens)
    other, other_drafts = texts(rng, rng.beta(4, 4, rates.shape), tokens)
    moved = np.rint(place * same + (1 - place) * other).astype(int)
    moved_drafts = np.rint(place * same_drafts + (1 - place) * other_drafts).astype(int)
    halves = []
    for a, n, b, m in zip(same, same_drafts, moved, moved_drafts, strict=True):
        found = intervals.difference([(light(w, x), light(y, z)) for w, x, y, z in zip(a, n, b, m, strict=True)])
        halves.append((found.relative_high - found.relative_low) / 2)
    return float(np.median(halves))


def table(heading: str) -> dict[tuple[int, int], float]:
    """Half-widths by prompts and tokens, as the guide prints them under `heading`, in per cent."""
    text = (ROOT / "docs" / "acceptance.md").read_text().split(heading)[1]
    lines = [line.strip("| ").split("|") for line in re.findall(r"^\|.*\|$", text, re.M)[:6]]
    tokens = [int(cell) for cell in lines[0][1:]]
    return {
        (int(row[0]), t): float(cell.strip(" %")) for row in lines[2:] for t, cell in zip(tokens, row[1:], strict=True)
    }


@pytest.mark.parametrize(("heading", "found"), [("### One", half_width), ("### Two", paired_half_width)])
@pytest.mark.parametrize("size", [(4, 32), (16, 64), (64, 64)], ids=str)
def test_the_guide_says_how_many_prompts_are_enough(heading: str, found, size: tuple[int, int]) -> None:
    assert 100 * found(*size) == pytest.approx(table(heading)[size], rel=0.05, abs=0.1)

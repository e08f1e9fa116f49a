"""From counts to tables, divergences and verdicts; results that go to a file and back; two runs compared."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specctl.core.tables import baselines
from specctl.errors import InputError, UsageError
from specctl.files.jsonfile import read_json, to_json
from specctl.recipes.judge import compare, judge
from specctl.records.evaluation import EvalResult, PromptResult, SizeResult, Step, count_steps
from specctl.records.evaluationfile import result_from_dict

SETTINGS = {
    "target": "t",
    "target_weights": "t",
    "draft": "d",
    "prompts": "p.jsonl",
    "num_draft_tokens": 3,
    "max_new_tokens": 8,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "ignore_eos": False,
    "turns": 1,
    "dtype": "bfloat16",
}


def prompt(name: str, *kept: int, tokens: tuple[int, ...] | None = None, gaps=None, **changes) -> PromptResult:
    """A text whose steps kept so many of three drafted tokens each."""
    steps: tuple[Step, ...] = tuple(((7, 8, 9), n) for n in kept)
    text = tuple(range(1 + sum(n + 1 for n in kept))) if tokens is None else tokens
    c = count_steps(steps, num_tokens=len(text))
    made = PromptResult(name, None, 0, (1, 2), text, c.num_drafts, c.proposed, c.accepted, steps, "length", gaps)
    return replace(made, **changes)


def size(pp: int, *results: PromptResult, **changes) -> SizeResult:
    return replace(SizeResult(pp, 1, results, 2.0), **changes)


def run(*sizes: SizeResult, **settings) -> EvalResult:
    return EvalResult({**SETTINGS, **settings}, {"specctl": "0.1.0"}, sizes)


PROMPTS = [prompt(f"q{i}", i % 4, (i + 1) % 4, 2) for i in range(16)]


# One run.


def test_the_table_of_a_size() -> None:
    results = (prompt("a", 3, 0, 2, 1), prompt("b", 1, 1, category="code"))
    found = judge(run(size(2, *results, plain_seconds=4.0, bytes_on_wire=280)), tolerance=0.05)
    [row] = found.rows
    assert (row.name, row.prompts, row.steps, row.drafts, row.tokens) == ("PP 2", 2, 6, 6, 16)
    assert row.length.value == pytest.approx(1 + 8 / 6)
    assert row.macro_mean == pytest.approx((2.5 + 2) / 2)
    assert row.tokens_per_step == pytest.approx(14 / 6)
    assert row.joint_rates == pytest.approx((5 / 6, 2 / 6, 1 / 6))
    assert row.conditional_rates == pytest.approx((5 / 6, 2 / 5, 1 / 2))
    assert (row.tokens_per_second, row.plain_tokens_per_second, row.speed_up) == (8, 4, 2)
    assert row.bytes_per_token == 17.5
    assert [(c.name, c.length.value) for c in row.categories] == [("none", 2.5), ("code", 2.0)]
    assert (found.outcome, found.exit_code, found.divergences) == (None, 0, ())


def test_plain_decoding_of_other_lengths_is_compared_by_speed_and_not_by_time() -> None:
    [row] = judge(run(size(1, *PROMPTS, plain_seconds=4.0, plain_tokens=64)), tolerance=0.05).rows
    assert row.speed_up == pytest.approx((row.tokens / 2) / (64 / 4))


def test_a_position_that_was_never_proposed_has_no_rate() -> None:
    [row] = judge(run(size(1, *PROMPTS), num_draft_tokens=5), tolerance=0.05).rows
    assert row.joint_rates[3:] == row.conditional_rates[3:] == (None, None)


def test_a_server_that_tells_counts_and_no_steps_is_judged_by_the_same_numbers() -> None:
    bare = [replace(result, steps=None) for result in PROMPTS]
    [row] = judge(run(size(1, *PROMPTS)), tolerance=0.05).rows
    [other] = judge(run(size(1, *bare)), tolerance=0.05).rows
    assert other == row
    again = result_from_dict(json.loads(to_json(run(size(1, *bare)).to_dict())), "x.json")
    assert again.sizes[0].results == tuple(bare)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accepted": (9, 0, 0)}, "more drafts kept a token than had it"),
        ({"accepted": (1, 2, 0)}, "more drafts kept a token"),
        ({"accepted": (1, 1)}, "`proposed` has 3 positions and `accepted` 2"),
    ],
)
def test_counts_without_steps_that_cannot_be_are_refused(changes: dict, message: str) -> None:
    bare = replace(PROMPTS[0], steps=None, **changes)
    with pytest.raises(InputError, match=message):
        result_from_dict(json.loads(to_json(run(size(1, bare)).to_dict())), "x.json")


def test_a_server_whose_weights_are_out_of_reach_is_compared_all_the_same() -> None:
    own, served = run(size(1, *PROMPTS)), run(size(1, *PROMPTS), target_weights=None)
    assert compare(own, served, tolerance=0.05).outcome == "within"
    with pytest.raises(UsageError, match="target_weights"):
        compare(own, run(size(1, *PROMPTS), target_weights="other"), tolerance=0.05)


def test_sizes_that_agree_are_within() -> None:
    found = judge(run(size(1, *PROMPTS), size(2, *PROMPTS), size(4, *PROMPTS, tp=2)), tolerance=0.05)
    assert (found.outcome, found.exit_code) == ("within", 0)
    assert [(row.name, row.against) for row in found.rows] == [
        ("PP 1", None),
        ("PP 2", "PP 1"),
        ("PP 4 x TP 2", "PP 1"),
    ]
    assert "+0.0 % to +0.0 %" in found.sentence


def test_a_size_that_loses_acceptance_everywhere_is_out_and_decides() -> None:
    worse = [prompt(f"q{i}", 0, 1, 0) for i in range(16)]
    found = judge(run(size(1, *PROMPTS), size(2, *PROMPTS), size(4, *worse)), tolerance=0.05)
    assert (found.outcome, found.exit_code) == ("out", 1)
    assert [row.decision.outcome for row in found.rows if row.decision] == ["within", "out"]
    assert "PP 4 differs from PP 1" in found.sentence


def test_few_prompts_that_swing_cannot_tell_and_say_how_many_would() -> None:
    first = [prompt(name, *kept) for name, kept in zip("abcd", [(3, 2, 1), (0, 1), (1, 0), (1, 2)], strict=True)]
    found = judge(run(size(1, *first), size(2, prompt("a", 0, 1, 0), *first[1:])), tolerance=0.05)
    assert (found.outcome, found.exit_code) == ("undecided", 3)
    assert found.prompts_needed is not None
    assert f"at least {found.prompts_needed} prompts would tell" in found.sentence
    assert any("4 prompts are few" in note for note in found.notes)


def test_one_changed_prompt_is_undecided() -> None:
    found = judge(run(size(1, prompt("a", 1)), size(2, prompt("a", 2))), tolerance=0.05)
    assert (found.outcome, found.prompts_needed) == ("undecided", None)
    assert "one prompt gives no interval" in found.sentence


def test_where_nothing_was_drafted_nothing_can_be_told_and_without_a_draft_nothing_is_asked() -> None:
    plain = replace(prompt("a", tokens=(4, 5)), steps=(((), 0),))
    assert judge(run(size(1, plain), size(2, plain)), tolerance=0.05).outcome == "undecided"
    found = judge(run(size(1, plain), size(2, plain), no_spec=True), tolerance=0.05)
    assert (found.outcome, found.exit_code, found.rows[0].tokens_per_step) == (None, 0, 1.0)


def test_a_draft_that_a_table_beats_is_told_so() -> None:
    repeated = [prompt(f"q{i}", 0, 0, 0, 0, 0, tokens=(5, 6, 7, 5, 6, 7)) for i in range(16)]
    result = run(size(1, *repeated))
    found = judge(replace(result, baselines=baselines(repeated, 3)), tolerance=0.05)
    assert [row.name for row in found.baselines] == ["prompt lookup", "trigram table"]
    # The second of its two steps has room for the target's own token only.
    assert (found.baselines[1].tokens_per_step, found.baselines[1].drafted_share) == (2.5, 0.5)
    assert any("trigram table gives" in note and "without a draft" in note for note in found.notes)


# Divergences.


@pytest.mark.parametrize(
    ("dtype", "gap", "is_near"),
    [("bfloat16", 0.1, True), ("bfloat16", 3.0, False), ("float32", 0.1, False), ("float32", 1e-4, True)],
)
def test_a_text_that_leaves_the_first_is_named_with_token_and_gap(dtype: str, gap: float, is_near: bool) -> None:
    first = prompt("a", 1, 1, gaps=(9.0, 8.0, gap, 7.0, 6.0))
    other = prompt("a", 1, 1, tokens=(0, 1, 9, 8, 7), gaps=(9.0, 8.0, gap / 2, 7.0, 6.0))
    found = judge(run(size(1, first), size(2, other), dtype=dtype), tolerance=0.05)
    [d] = found.divergences
    assert (d.id, d.size, d.against, d.index, d.token, d.other_token) == ("a", "PP 2", "PP 1", 2, 9, 2)
    assert (d.gap, d.other_gap, d.is_near) == (gap / 2, gap, is_near)


def test_a_divergence_without_gaps_or_dtype_is_left_unexplained() -> None:
    first, other = prompt("a", 1, 1), prompt("a", 1, 1, tokens=(0, 1))
    [d] = judge(run(size(1, first), size(2, other)), tolerance=0.05).divergences
    assert (d.index, d.token, d.other_token, d.gap, d.is_near) == (2, None, 2, None, None)
    gaps = (0.0, 0.0)
    named = replace(other, gaps=gaps, tokens=(0, 2))
    [d] = judge(run(size(1, first), size(2, named), dtype="auto"), tolerance=0.05).divergences
    assert d.is_near is None


def test_sampled_texts_and_turns_after_a_divergence_are_no_divergences() -> None:
    first, other = prompt("a", 1, 1), prompt("a", 1, 1, tokens=(0, 1, 9, 8, 7))
    assert not judge(run(size(1, first), size(2, other), temperature=1.0), tolerance=0.05).divergences
    turns = [replace(p, turn=1, prompt_ids=ids) for p, ids in ((first, (1, 2, 3)), (other, (1, 2, 4)))]
    found = judge(run(size(1, first, turns[0]), size(2, other, turns[1])), tolerance=0.05)
    assert [(d.id, d.turn) for d in found.divergences] == [("a", 0)]


def test_sizes_of_other_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="1 of 16 turns are missing, first `q15`"):
        judge(run(size(1, *PROMPTS), size(2, *PROMPTS[:-1])), tolerance=0.05)


# Two runs.


def test_two_runs_are_compared_size_by_size() -> None:
    old = run(size(1, *PROMPTS), size(2, *PROMPTS))
    new = run(size(2, *[prompt(f"q{i}", 0, 1, 0) for i in range(16)]), size(4, *PROMPTS))
    found = compare(old, new, tolerance=0.05)
    assert [(row.name, row.against) for row in found.rows] == [
        ("A PP 1", None),
        ("A PP 2", None),
        ("B PP 2", "A PP 2"),
        ("B PP 4", "A PP 1"),
    ]
    assert (found.outcome, found.exit_code) == ("out", 1)
    assert compare(old, old, tolerance=0.0).outcome == "within"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_weights", "u"),
        ("prompts_sha256", "0f"),
        ("template_sha256", "0f"),
        ("num_draft_tokens", 4),
        ("max_new_tokens", 9),
        ("temperature", 1.0),
        ("top_p", 0.9),
        ("top_k", 5),
        ("draft_sampling", "sampled"),
        ("seed", 1),
        ("ignore_eos", True),
        ("no_spec", True),
        ("turns", 2),
    ],
)
def test_runs_of_other_settings_are_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{key} is .* and {value!r}") as caught:
        compare(run(size(1, *PROMPTS)), run(size(1, *PROMPTS), **{key: value}), tolerance=0.05)
    assert caught.value.exit_code == 2


def test_every_differing_setting_is_named_and_others_do_not_matter() -> None:
    with pytest.raises(UsageError, match=r"target_weights is 't' and 'u'; seed is 0 and 1$"):
        compare(run(size(1, *PROMPTS)), run(size(1, *PROMPTS), target_weights="u", seed=1), tolerance=0.05)
    others = {"batch": 8, "dtype": "float32", "draft": "e", "target": "elsewhere"}
    found = compare(run(size(1, *PROMPTS)), run(size(1, *PROMPTS), **others), tolerance=0.05)
    assert found.outcome == "within"


def test_runs_of_other_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="missing, first `q15`") as caught:
        compare(run(size(1, *PROMPTS)), run(size(1, *PROMPTS[:-1])), tolerance=0.05, names=("old", "new"))
    assert caught.value.where == "new PP 1"


# To a file and back.


def full_result() -> EvalResult:
    results = [
        prompt("a", 3, 0, gaps=(0.5, float("inf"), 1.0, 2.0, 0.25, 0.125)),
        prompt("b", 1, turn=1, stop_reason="eos"),
    ]
    result = run(size(1, *results, plain_seconds=3.0, bytes_on_wire=5), size(2, *results))
    return replace(result, baselines=baselines(results, 3))


@pytest.mark.parametrize(
    "wrap", [lambda d: d, lambda d: {"report": {"result": d, "judgement": {}}}, lambda d: {"result": d}]
)
def test_a_result_survives_its_file(wrap, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(to_json(wrap(full_result().to_dict())))
    assert result_from_dict(read_json(path)[0], "a.json") == full_result()


def edited(*path: str | int, value: object) -> object:
    data = json.loads(to_json(full_result().to_dict()))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


FIRST = ("sizes", 0, "results", 0)


@pytest.mark.parametrize(
    ("path", "value", "message", "where"),
    [
        (("sizes",), None, "expected a result of `specctl eval`", "x.json"),
        (("settings",), [], "expected a result of `specctl eval`", "x.json"),
        (("sizes",), [], "at least one size", "x.json: sizes"),
        (("sizes", 0), 3, "expected an object and found `int`", "x.json: sizes[0]"),
        (("sizes", 0, "pp"), 0, "at least 1 and found 0", "x.json: sizes[0]: pp"),
        (("sizes", 0, "seconds"), "2", "expected a number", "x.json: sizes[0]: seconds"),
        (("sizes", 0, "seconds"), None, "expected a number", "x.json: sizes[0]: seconds"),
        (("sizes", 1, "results", 1, "id"), "a", "expected", None),
        ((*FIRST, "num_drafts"), 3, "`num_drafts` is 3, and the steps give 2", "x.json: sizes[0]: results[0]"),
        ((*FIRST, "accepted"), [1, 1, 0], "the steps give [1, 1, 1]", "x.json: sizes[0]: results[0]"),
        ((*FIRST, "proposed"), [2, 2], "the steps give [2, 2, 2]", "x.json: sizes[0]: results[0]"),
        ((*FIRST, "tokens"), [1, True], "expected an integer", "x.json: sizes[0]: results[0]: tokens[1]"),
        ((*FIRST, "tokens"), "12", "expected a list", "x.json: sizes[0]: results[0]: tokens"),
        ((*FIRST, "steps", 0), [[1], 2], "2 of 1 drafted", "x.json: sizes[0]: results[0]: steps[0]"),
        ((*FIRST, "steps", 0), [1], "drafted ids and the number", "x.json: sizes[0]: results[0]: steps[0]"),
        ((*FIRST, "stop_reason"), "end", "`eos` or `length`", "x.json: sizes[0]: results[0]: stop_reason"),
        ((*FIRST, "gaps"), [1.0], "1 gaps for 6 tokens", "x.json: sizes[0]: results[0]: gaps"),
        (("baselines", 0, "results", 0, "reached"), [], "differ in length", "x.json: baselines[0]: results[0]"),
    ],
)
def test_a_damaged_result_is_refused_with_its_place(path, value: object, message: str, where: str | None) -> None:
    data = edited(*path, value=value)
    if where is None:
        data["sizes"][1]["results"][1]["turn"] = 0
        message, where = "prompt `a`, turn 0 stands twice", "x.json: sizes[1]"
    with pytest.raises(InputError) as caught:
        result_from_dict(data, "x.json")
    assert message in caught.value.message
    assert caught.value.where == where


def test_zeros_for_positions_that_nothing_reached_may_be_left_out() -> None:
    data = edited(*FIRST, "accepted", value=[1, 1, 1, 0])
    data["sizes"][0]["results"][0]["proposed"] = [2, 2, 2, 0]
    assert result_from_dict(data, "x.json").sizes[0].results[0].counts().accepted == (1, 1, 1)


def test_what_is_no_object_is_refused() -> None:
    for data in ([], None, 3, {}, {"report": None}):
        with pytest.raises(InputError):
            result_from_dict(data, "x.json")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"target_weights": "x", "target": "a"}, {"target_weights": "x", "target": "b"}, []),
        (
            {"target_weights": "x", "target": "a"},
            {"target_weights": None, "target": "b"},
            ["whether `a` and `b` are one target"],
        ),
        ({"target": "a"}, {"target": "a"}, []),
        ({"dtype": "float32"}, {"dtype": None}, ["the dtype of B is not known"]),
        ({"dtype": None}, {"dtype": None}, []),
    ],
)
def test_what_a_server_did_not_say_is_said_beside_a_comparison(first: Any, second: Any, words: list[str]) -> None:
    one = run(size(1, prompt("a", 1, 2)))
    results = [replace(one, settings={**one.settings, **more}) for more in (first, second)]
    notes = compare(results[0], results[1], tolerance=0.05).notes
    told = [note for note in notes if "known" in note]
    assert len(told) == len(words)
    assert all(word in note for word, note in zip(words, told, strict=True))

"""Counters in Prometheus text: what is read, what they rose by, and what is no such thing."""

import json
from dataclasses import replace

import pytest
from serverparts import recorded, recorded_json

from specctl.engines._counters import Counters, parse_samples, read_counters, risen, tells_work
from specctl.errors import MachineError

WHERE = "http://host/metrics"


def scrape(name: str) -> Counters:
    counters = read_counters(recorded(f"metrics-{name}.txt"), WHERE)
    assert counters is not None
    return counters


def test_recorded_counters_rise_by_what_the_recorded_answers_tell() -> None:
    scrapes = [scrape(name) for name in ("before", "after-1", "after-2", "after-3")]
    answers = recorded_json("completions")
    for before, after, answer in zip(scrapes, scrapes[1:], answers, strict=False):
        change, told = risen(before, after, WHERE), answer["metrics"]["speculative_decoding"]
        assert change.drafts == told["num_spec_steps"]
        assert change.draft_tokens == told["num_draft_tokens"]
        assert change.accepted == told["num_accepted_draft_tokens"] == sum(change.per_position)
        assert change.per_position == tuple(sum(kept > i for kept in told["per_step_accepted"]) for i in range(3))
        assert change.requests == 1 and change.read is None
        tokens = len(answer["choices"][0]["token_ids"])
        assert change.written == tokens
        assert tokens <= 1 + change.drafts + change.accepted <= tokens + 3


def test_engines_are_added_and_the_suffix_may_be_missing() -> None:
    text = recorded("metrics-after-3.txt")
    both = text + text.replace('engine="0"', 'engine="1"')
    one, two = scrape("after-3"), read_counters(both, WHERE)
    assert two is not None
    assert (two.drafts, two.accepted) == (2 * one.drafts, 2 * one.accepted)
    assert two.per_position == tuple(2 * count for count in one.per_position)
    assert read_counters(text.replace("_total", ""), WHERE) == one


def test_a_scrape_tells_whether_it_counts_the_work_and_the_tokens_of_prompts() -> None:
    text = recorded("metrics-after-3.txt")
    assert tells_work(text, WHERE) and not tells_work("process_start_time_seconds 5.0\n", WHERE)
    counters = read_counters(text + 'vllm:prompt_tokens_total{engine="0"} 9.0\n', WHERE)
    assert counters is not None and counters.read == 9


@pytest.mark.parametrize("missing", ["num_drafts", "num_draft_tokens", "num_accepted_tokens_per_pos", "spec_decode"])
def test_without_one_of_the_counters_there_are_none(missing: str) -> None:
    lines = [line for line in recorded("metrics-after-3.txt").splitlines() if missing not in line]
    assert read_counters("\n".join(lines), WHERE) is None


def test_a_missing_position_is_no_position() -> None:
    lines = [line for line in recorded("metrics-after-3.txt").splitlines() if 'position="1"' not in line]
    assert read_counters("\n".join(lines), WHERE) is None


def test_labels_are_read_with_their_escapes_and_commas() -> None:
    (sample,) = parse_samples('a_total{x="1,2",y="q\\"\\\\\\n{}",} 3e2 1700000000000\n\n# no {sample', WHERE)
    assert (sample.name, sample.labels, sample.value) == ("a_total", {"x": "1,2", "y": 'q"\\\n{}'}, 300.0)


@pytest.mark.parametrize("line", ["<html>", "a{b=1} 2", 'a{b="1} 2', "a", "a x", "{} 1", json.dumps({"a": 1})])
def test_text_that_is_no_scrape_is_named(line: str) -> None:
    with pytest.raises(MachineError, match="Prometheus") as caught:
        parse_samples(f"fine 1\n{line}\n", WHERE)
    assert caught.value.where == f"{WHERE} line 2"


@pytest.mark.parametrize("value", ["1.5", "-1.0", "NaN", "+Inf"])
def test_a_counter_that_is_no_count_is_refused(value: str) -> None:
    text = recorded("metrics-before.txt").replace(
        'num_drafts_total{engine="0",model_name="smol"} 0.0', f'num_drafts_total{{engine="0"}} {value}'
    )
    with pytest.raises(MachineError, match="a count is expected"):
        read_counters(text, WHERE)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param({"drafts": 1, "draft_tokens": 3, "accepted": 0, "per_position": (0, 0, 0)}, id="fell"),
        pytest.param({"started": 5.0}, id="another process"),
        pytest.param({"per_position": (9, 9)}, id="other drafts"),
        pytest.param({"requests": 0}, id="requests fell"),
        pytest.param({"written": 0}, id="tokens fell"),
    ],
)
def test_a_server_that_began_anew_is_noticed(after) -> None:
    before = replace(scrape("after-3"), started=4.0)
    with pytest.raises(MachineError, match="began anew"):
        risen(before, replace(before, **after), WHERE)
    assert risen(before, replace(before, drafts=before.drafts + 2), WHERE).drafts == 2

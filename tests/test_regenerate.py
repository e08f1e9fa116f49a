"""Answers of a tiny real target: what is asked, what is written, and what survives a stop."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tiny_chat_target import make_tiny_chat_target, tiny_tokenizer
from transformers import GenerationConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specctl.cli.regenerate import EXAMPLES, register
from specctl.core.answers import open_answers
from specctl.core.conversations import read_rows
from specctl.core.device import pick_device
from specctl.core.generation import answer_batch, open_encoder, open_speaker
from specctl.core.target import describe_target, load_target
from specctl.errors import (
    DataError,
    InterruptedRun,
    MachineError,
    SettingsChangedError,
    TargetError,
    UsageError,
)
from specctl.recipes.regenerate import regenerate
from specctl.records.conversation import Conversation, Turn
from specctl.records.dialogue import Dialogue, dialogue
from specctl.records.progress import SilentReporter
from specctl.records.regeneration import RegenerateConfig, RegenerateReport

MOST = 24
RUN = """
import sys
from specctl.recipes.regenerate import regenerate
from specctl.records.progress import SilentReporter
from specctl.records.regeneration import RegenerateConfig
regenerate(RegenerateConfig(sys.argv[1], (sys.argv[2],), sys.argv[3], max_new_tokens=24, batch=2), SilentReporter())
"""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_chat_target(tmp_path_factory.mktemp("regenerate") / "target")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    turns = [[f"Say {'abc' * (i % 5)} {i}", f"again {i}"] for i in range(24)]
    rows = [{"question_id": i, "category": "x", "turns": asked} for i, asked in enumerate(turns)]
    return write_rows(tmp_path / "prompts.jsonl", rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(target: Path, prompts: Path | str, out: Path, **settings: Any) -> RegenerateReport:
    settings = {"max_new_tokens": MOST, "batch": 4, **settings}
    return regenerate(RegenerateConfig(str(target), (str(prompts),), str(out), **settings), SilentReporter())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def plain_answer(target: Path, messages: list[dict[str, str]]) -> str:
    """One conversation through transformers alone: no batch, no padding."""
    tokenizer, model = tiny_tokenizer(), LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=[258, 256], pad_token_id=256)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MOST, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_batched_greedy_answers_equal_plain_generate_turn_by_turn(target: Path, prompts: Path, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl")
    for row in rows_of(tmp_path / "out.jsonl")[:8]:
        for i, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                assert message["content"] == plain_answer(target, row["messages"][:i])


def test_rows_come_in_input_order_and_read_back_as_conversations(target: Path, prompts: Path, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl")
    read = list(read_rows([str(tmp_path / "out.jsonl")]))
    assert [(row.row_id, row.category) for row in read if isinstance(row, Conversation)] == [
        (str(i), "x") for i in range(24)
    ]


def test_rows_name_no_absolute_path(target: Path, prompts: Path, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl", limit=2)
    assert str(tmp_path) not in (tmp_path / "out.jsonl").read_text() and str(target) not in str(
        rows_of(tmp_path / "out.jsonl")
    )


def test_a_cut_answer_ends_its_conversation_and_is_marked(target: Path, prompts: Path, tmp_path: Path) -> None:
    """vllm-project/speculators#835: answers cut at the limit were counted as complete."""
    report = run(target, prompts, tmp_path / "out.jsonl")
    cut = [row for row in rows_of(tmp_path / "out.jsonl") if row["truncated"]]
    assert report.truncated == len(cut) > 0
    for row in rows_of(tmp_path / "out.jsonl"):
        answers = sum(m["role"] == "assistant" for m in row["messages"])
        assert len(row["finish_reasons"]) == answers == 2 - row.get("unanswered_turns", 0)
        assert row["truncated"] == (row["finish_reasons"][-1] == "length")
        assert "length" not in row["finish_reasons"][:-1]


def test_drop_truncated_leaves_them_out_and_does_not_compute_them_again(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    first = run(target, prompts, out, drop_truncated=True)
    second = run(target, prompts, out, drop_truncated=True)
    assert first.rows == 24 - first.truncated < 24
    assert not any(row["truncated"] for row in rows_of(out))
    assert (second.new_rows, second.rows, second.drops) == (0, first.rows, first.drops)
    with_them = run(target, prompts, out)
    run(target, prompts, tmp_path / "fresh.jsonl")
    assert (with_them.new_rows, with_them.rows) == (0, 24)
    assert out.read_bytes() == (tmp_path / "fresh.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh.jsonl", "out.jsonl", "prompts.jsonl"]


def test_answers_of_the_input_are_replaced_and_system_turns_stay(target: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "THE OLD ANSWER"},
        {"role": "user", "content": "And?"},
    ]
    prompts = write_rows(tmp_path / "p.jsonl", [{"messages": messages}])
    run(target, prompts, tmp_path / "out.jsonl")
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert [m["role"] for m in row["messages"]][:3] == ["system", "user", "assistant"]
    assert "THE OLD ANSWER" not in str(row)


def test_what_is_no_conversation_is_refused_and_counted(target: Path, tmp_path: Path) -> None:
    tool = [{"role": "user", "content": "a"}, {"role": "tool", "content": "42"}]
    rows: list[dict[str, Any]] = [
        {"text": "running text"},
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"messages": tool},
        {"prompt": "hello"},
        {"prompt": "hello"},
        {"prompt": "x" * 600},
        {"nonsense": 1},
    ]
    report = run(target, write_rows(tmp_path / "p.jsonl", rows), tmp_path / "out.jsonl")
    assert report.rows == 1
    assert report.drops == {
        "not_a_conversation": 2,
        "prompt_too_long": 1,
        "repeated": 1,
        "tool_turns": 1,
        "unknown_row": 1,
    }


def test_an_answer_ends_where_the_context_does(tmp_path: Path) -> None:
    short = make_tiny_chat_target(tmp_path / "short", max_positions=64, stop_scale=0.0)
    rows = [{"turns": ["a" * 20, "more"]}, {"turns": ["b", "more"]}]
    report = run(short, write_rows(tmp_path / "p.jsonl", rows), tmp_path / "out.jsonl", max_new_tokens=500)
    tokenizer = tiny_tokenizer()
    for row in rows_of(tmp_path / "out.jsonl"):
        text = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, tokenize=False)
        text += row["messages"][1]["content"]
        assert len(tokenizer(text)["input_ids"]) == 64
    assert (report.truncated, report.unanswered_turns) == (2, 2)


def test_an_empty_answer_is_kept_and_counted(tmp_path: Path) -> None:
    silent = make_tiny_chat_target(tmp_path / "silent", stop_scale=60.0)
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(12)])
    report = run(silent, prompts, tmp_path / "out.jsonl")
    empty = [r for r in rows_of(tmp_path / "out.jsonl") if r["messages"][1]["content"] == ""]
    assert report.empty_answers == len(empty) > 0
    assert report.rows == 12


def test_reasoning_that_the_template_opens_is_part_of_the_answer(target: Path, tmp_path: Path) -> None:
    template = tmp_path / "think.jinja"
    template.write_text("{{ messages[0]['content'] }}{% if add_generation_prompt %}A:<think>\n{% endif %}")
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "why"}])
    run(target, prompts, tmp_path / "out.jsonl", chat_template=str(template))
    assert rows_of(tmp_path / "out.jsonl")[0]["messages"][1]["content"].startswith("<think>\n")


def test_a_row_that_the_template_refuses_is_counted(target: Path, tmp_path: Path) -> None:
    template = tmp_path / "no-system.jinja"
    template.write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    rows: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "b", "system": "s"}]
    report = run(target, write_rows(tmp_path / "p.jsonl", rows), tmp_path / "out.jsonl", chat_template=str(template))
    assert (report.rows, report.drops) == (1, {"template_error": 1})


def test_a_target_without_a_template_is_refused_with_the_option(tmp_path: Path) -> None:
    base = make_tiny_chat_target(tmp_path / "base", template=None)
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}])
    with pytest.raises(TargetError) as raised:
        run(base, prompts, tmp_path / "out.jsonl")
    assert "--chat-template" in str(raised.value.hint)


def test_sampled_runs_repeat_with_their_seed_and_differ_with_another(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(target, prompts, tmp_path / name, temperature=1.0, top_p=0.9, seed=seed)
    contents = [[row["messages"] for row in rows_of(tmp_path / name)] for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kept", [0, 5, 13])
def test_a_resumed_run_equals_an_uninterrupted_one(
    target: Path, prompts: Path, tmp_path: Path, kept: int, temperature: float
) -> None:
    """Rows 0..kept and half of the next one are on disk, as a crash leaves them."""
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run(target, prompts, whole, temperature=temperature)
    lines = whole.read_bytes().splitlines(keepends=True)
    (tmp_path / "out.jsonl.partial").write_bytes(b"".join(lines[:kept]) + lines[kept][:40])
    report = run(target, prompts, out, temperature=temperature)
    assert report.new_rows == 24 - kept
    assert out.read_bytes() == whole.read_bytes()


def test_a_killed_process_continues_to_the_same_bytes(target: Path, prompts: Path, tmp_path: Path) -> None:
    rows = [{"id": str(i), "turns": [f"Say {i}", "again", "and again"]} for i in range(120)]
    prompts, partial = write_rows(tmp_path / "many.jsonl", rows), tmp_path / "out.jsonl.partial"
    command = [sys.executable, "-c", RUN, str(target), str(prompts), str(tmp_path / "out.jsonl")]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 120
        while not (partial.exists() and partial.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out.jsonl").exists()
    report = run(target, prompts, tmp_path / "out.jsonl", batch=2)
    assert 0 < report.new_rows < 120
    run(target, prompts, tmp_path / "whole.jsonl", batch=2)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


class _StoppingReporter(SilentReporter):
    """The user presses Ctrl-C after some rows."""

    def advance(self, amount: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_the_rows_and_says_how_to_continue(target: Path, prompts: Path, tmp_path: Path) -> None:
    config = RegenerateConfig(str(target), (str(prompts),), str(tmp_path / "out.jsonl"), max_new_tokens=MOST, batch=4)
    with pytest.raises(InterruptedRun, match="4 new rows") as raised:
        regenerate(config, _StoppingReporter())
    assert "continue" in str(raised.value.hint)
    assert len(rows_of(tmp_path / "out.jsonl.partial")) == 4
    assert regenerate(config, SilentReporter()).new_rows == 20


def test_a_second_run_changes_nothing_and_loads_no_weights(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(target, prompts, out)
    before = out.stat()
    report = run(target, prompts, out)
    assert (report.new_rows, report.rows, out.stat().st_mtime_ns) == (0, 24, before.st_mtime_ns)


def test_more_prompts_extend_the_file_and_a_changed_one_replaces_its_row(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(target, write_rows(tmp_path / "p.jsonl", [{"id": "a", "prompt": "one"}]), out)
    changed = [{"id": "b", "prompt": "new"}, {"id": "a", "prompt": "changed"}]
    report = run(target, write_rows(tmp_path / "p.jsonl", changed), out)
    assert report.new_rows == 2
    assert [row["messages"][0]["content"] for row in rows_of(out)] == ["new", "changed"]


def test_rows_of_other_prompts_stay_behind_the_asked_ones(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(target, write_rows(tmp_path / "p.jsonl", [{"id": "a", "prompt": "one"}]), out)
    report = run(target, write_rows(tmp_path / "q.jsonl", [{"id": "b", "prompt": "two"}]), out)
    assert (report.rows, report.other_rows) == (2, 1)
    assert [row["id"] for row in rows_of(out)] == ["b", "a"]


def test_changed_settings_are_refused_and_listed(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(target, prompts, out, limit=2)
    with pytest.raises(SettingsChangedError, match=r"max_new_tokens: 24 -> 25; seed: None -> 0; temperature"):
        run(target, prompts, out, limit=2, max_new_tokens=25, temperature=0.5)
    assert run(target, prompts, out, limit=2, max_new_tokens=25, overwrite=True).new_rows == 2


def test_another_target_of_the_same_name_is_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    run(target, prompts, tmp_path / "out.jsonl", limit=1)
    other = make_tiny_chat_target(tmp_path / "other" / target.name, seed=1)
    with pytest.raises(SettingsChangedError, match="weights: "):
        run(other, prompts, tmp_path / "out.jsonl", limit=1)


@pytest.mark.parametrize("content", ['{"a": 1}\n', "hello", '{"prompt": "q"}', "[1]\n"])
def test_a_foreign_file_is_refused_and_left_alone(target: Path, prompts: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(DataError, match="not written by"):
        run(target, prompts, out, limit=1)
    assert out.read_text() == content
    assert run(target, prompts, out, limit=1, overwrite=True).rows == 1


def test_leftovers_of_a_removed_file_do_not_confuse(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(target, prompts, out, drop_truncated=True)
    assert (tmp_path / "out.jsonl.truncated").exists()
    out.unlink()
    report = run(target, prompts, out, max_new_tokens=12)
    assert report.new_rows == 24
    assert not (tmp_path / "out.jsonl.truncated").exists()


def test_two_runs_at_once_on_one_file_are_refused(target: Path, prompts: Path, tmp_path: Path) -> None:
    with (
        open_answers(tmp_path / "out.jsonl", {}, overwrite=False),
        pytest.raises(MachineError, match="another run"),
    ):
        run(target, prompts, tmp_path / "out.jsonl")


def test_prompts_come_from_standard_input(target: Path, prompts: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, str(target), "-", str(tmp_path / "out.jsonl")]
    subprocess.run(command, input=prompts.read_bytes(), check=True, timeout=120)
    assert [row["source"] for row in rows_of(tmp_path / "out.jsonl")][:2] == ["stdin:1", "stdin:2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "hold no rows"),
        ('{"text": "a"}\n{"x": 1}\n', "no row is kept of 2: not_a_conversation 1, unknown_row 1"),
    ],
)
def test_no_rows_is_an_error_that_counts_the_reasons(target: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        run(target, tmp_path / "p.jsonl", tmp_path / "out.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


def test_all_rows_truncated_and_dropped_is_an_error_and_keeps_the_work(tmp_path: Path) -> None:
    endless = make_tiny_chat_target(tmp_path / "endless", stop_scale=0.0)
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(DataError, match="truncated 2"):
        run(endless, prompts, tmp_path / "out.jsonl", drop_truncated=True)
    assert run(endless, prompts, tmp_path / "out.jsonl").new_rows == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.9}, "--top-p"),
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"limit": 0}, "--limit"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"concurrency": 4}, "--concurrency"),
        ({"api_key_env": "KEY"}, "--api-key-env"),
        ({"endpoint": "http://localhost:1", "batch": None, "device": "cpu"}, "--device"),
    ],
)
def test_options_that_would_be_ignored_or_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(Path("target"), "prompts", Path("out"), **settings)


def test_the_prompt_file_is_never_written_over(target: Path, prompts: Path) -> None:
    before = prompts.read_bytes()
    with pytest.raises(UsageError, match="one of the prompt files"):
        run(target, prompts, prompts, overwrite=True)
    assert prompts.read_bytes() == before


def test_a_path_that_cannot_be_written_is_named(target: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError) as raised:
        run(target, prompts, tmp_path / "file" / "out.jsonl")
    assert str(tmp_path / "file") in str(raised.value.where)


def test_a_full_disk_is_named_and_a_later_run_continues(target: Path, prompts: Path, tmp_path: Path) -> None:
    """A file-size limit of the operating system stands for the full disk; it fails the same write."""
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n" + RUN
    command = [sys.executable, "-c", code, str(target), str(prompts), str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "MachineError: cannot write: File too large" in done.stderr
    run(target, prompts, tmp_path / "out.jsonl", batch=2)
    run(target, prompts, tmp_path / "whole.jsonl", batch=2)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_penalties_of_the_targets_generation_config_are_put_aside(target: Path) -> None:
    spec = describe_target(str(target))
    loaded = load_target(spec, dtype="float32", device=pick_device("cpu"))
    assert loaded.model.generation_config.repetition_penalty == 1.3  # type: ignore[union-attr]
    encoder = open_encoder(spec)
    asked = dialogue(Conversation((Turn("user", "Say abc 14"),), "p:1"))
    assert isinstance(asked, Dialogue)
    config = RegenerateConfig(str(target), ("p",), "o", max_new_tokens=MOST)
    (answered,) = answer_batch([asked], open_speaker(loaded, encoder), sampling=config.sampling)
    assert answered.answers[0].content == plain_answer(target, [{"role": "user", "content": "Say abc 14"}])


def test_the_key_follows_the_content_and_not_the_place() -> None:
    turns = (Turn("user", "a"), Turn("assistant", "old"), Turn("user", "b"))
    first, second = dialogue(Conversation(turns, "x:1")), dialogue(Conversation((turns[0], turns[2]), "y:9"))
    assert isinstance(first, Dialogue) and isinstance(second, Dialogue)
    assert first.key == second.key


def command() -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)
    register(app)
    return app


def test_the_command_prints_what_it_wrote(target: Path, prompts: Path, tmp_path: Path) -> None:
    args = ["regenerate", str(target), str(prompts), "--out", str(tmp_path / "out.jsonl"), "--max-new-tokens", "24"]
    text = CliRunner().invoke(command(), args, catch_exceptions=False)
    again = CliRunner().invoke(command(), [*args, "--json"], catch_exceptions=False)
    assert "conversations\t24 (24 new)" in text.stdout
    assert json.loads(again.stdout)["report"]["new_rows"] == 0


def test_a_config_file_fills_what_flags_leave_out(target: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'out = "{tmp_path / "out.jsonl"}"\nmax-new-tokens = 24\nlimit = 9\n')
    args = ["regenerate", str(target), str(prompts), "--config", str(tmp_path / "run.toml"), "--limit", "3", "--json"]
    done = CliRunner().invoke(command(), args, catch_exceptions=False)
    assert json.loads(done.stdout)["report"]["rows"] == 3
    assert rows_of(tmp_path / "out.jsonl")[0]["settings"]["max_new_tokens"] == 24


def test_a_missing_out_and_a_missing_key_are_usage_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECCTL_TEST_KEY", raising=False)
    with pytest.raises(UsageError, match="`--out` is missing"):
        CliRunner().invoke(command(), ["regenerate", "m", "p.jsonl"], catch_exceptions=False)
    remote = ["--endpoint", "http://127.0.0.1:1", "--api-key-env", "SPECCTL_TEST_KEY", "--out", "o"]
    with pytest.raises(UsageError, match="no `SPECCTL_TEST_KEY`"):
        CliRunner().invoke(command(), ["regenerate", "m", "p.jsonl", *remote], catch_exceptions=False)


def test_the_examples_are_commands_of_this_program() -> None:
    assert len(EXAMPLES) == 3
    assert all(example.startswith("specctl regenerate ") for example in EXAMPLES)

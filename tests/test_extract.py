"""`specctl extract` as its user meets it: a real process, real files, streams and exit codes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import chat_rows

from specctl.core.folder import read_manifest
from specctl.errors import DataError, SpecctlError, UsageError
from specctl.plugins import load_store
from specctl.recipes.dryrun import plan_only
from specctl.recipes.extract import extract
from specctl.records.extraction import ExtractConfig, role_map
from specctl.records.progress import SilentReporter
from specctl.records.sample import Dropped


def run(target: str, data: str, out: Path, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"layers": "0,4,last,norm", "dtype": "float32", "device": "cpu"}
    return extract(ExtractConfig(target, (data,), str(out), **{**defaults, **settings}), SilentReporter())


def samples_of(folder: Path, slot: str) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Ids, mask and one slot's states by sample id."""
    manifest = read_manifest(folder)
    store = load_store(manifest.settings["format"])
    found = {}
    for entry in manifest.shards:
        shard = store.open_shard(folder / "shards" / entry.file, entry)
        offsets = shard.offsets()
        for i, name in enumerate(shard.sample_ids):
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            found[name] = (shard.input_ids()[rows], shard.loss_mask()[rows], shard.slot(slot)[rows])
    return found


def test_every_sample_keeps_its_own_tokens_and_states(tiny: Any, chats: Any, tmp_path: Path) -> None:
    """States of one request landed in another's output once batches were reordered (sgl-project/sglang#4997).

    Each stored sample is run alone through plain transformers and compared.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tiny("llama")
    run(target, chats(25), tmp_path / "o", batch_tokens=300)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = {str(row["id"]): tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in chat_rows(25)}
    found = samples_of(tmp_path / "o", "4")
    assert set(found) == set(texts)
    for name, (ids, mask, states) in found.items():
        assert tokenizer.decode(ids) == texts[name]
        assert len(ids) == len(mask) == len(states)
        with torch.inference_mode():
            expected = model(torch.from_numpy(ids.copy()).long()[None], output_hidden_states=True).hidden_states[4][0]
        torch.testing.assert_close(torch.from_numpy(states.copy()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "moe", "hybrid", "multimodal", "gpt2"])
def test_every_family_extracts_and_verifies_against_plain_transformers(
    family: str, tiny: Any, chats: Any, tmp_path: Path
) -> None:
    from specctl.recipes.verify import VerifyConfig, verify

    run(tiny(family), chats(6), tmp_path / "o", layers="0,2,last,norm", format="parquet")
    report = verify(VerifyConfig(str(tmp_path / "o"), tiny(family), device="cpu"), SilentReporter())
    assert report.ok, report.faults
    assert set(report.logits) == {"norm", "last"}
    assert max(report.logits.values()) < 1e-6


def test_sources_of_every_kind_mix_and_none_is_lost(tiny: Any, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}]},
        {"prompt": "e", "completion": "f"},
        {"text": "some running text"},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"question_id": 81, "category": "x", "turns": ["no answer yet"]},
        {"messages": []},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    report = run(tiny("llama"), str(path), tmp_path / "o")
    assert report.samples == 5
    assert report.drops == {"bad_json": 1, "empty": 1, "no_assistant": 1}
    assert report.samples + sum(report.drops.values()) == report.rows == 8


def test_no_kept_sample_is_an_error_with_the_reasons_counted(tiny: Any, tmp_path: Path) -> None:
    """A dump that wrote zero files and exited 0 (NVIDIA/Model-Optimizer#2172)."""
    path = tmp_path / "empty.jsonl"
    path.write_text('{"messages": []}\n' * 3 + "{\n")
    with pytest.raises(DataError, match="all 4 rows were dropped: bad_json 1, empty 3"):
        run(tiny("llama"), str(path), tmp_path / "o")
    path.write_text("")
    with pytest.raises(DataError, match="DATA has no rows"):
        run(tiny("llama"), str(path), tmp_path / "o")


def test_limit_takes_from_every_file_and_the_same_for_the_same_seed(tiny: Any, chats: Any, tmp_path: Path) -> None:
    """Only the first source survived a limit (vllm-project/speculators#644)."""
    data = (chats(40, 0, "a.jsonl"), chats(40, 1, "b.jsonl"))
    picks = []
    for name, files, seed in (("x", data, 0), ("y", data[::-1], 0), ("z", data, 1)):
        config = ExtractConfig(
            tiny("llama"), files, str(tmp_path / name), layers="4", limit=20, seed=seed, device="cpu"
        )
        extract(config, SilentReporter())
        picks.append(set(samples_of(tmp_path / name, "4")))
    assert {name.split("-")[1] for name in picks[0]} == {"0", "1"}
    assert picks[0] == picks[1] != picks[2]
    assert all(len(pick) == 20 for pick in picks)


def test_a_dry_run_counts_what_the_run_then_makes_and_writes_nothing(tiny: Any, chats: Any, tmp_path: Path) -> None:
    config = ExtractConfig(
        tiny("llama"), (chats(20),), str(tmp_path / "o"), layers="0,4", dtype="float32", device="cpu"
    )
    planned = plan_only(config, SilentReporter())
    assert not (tmp_path / "o").exists()
    made = extract(config, SilentReporter())
    assert made is not None
    assert (planned.samples, planned.tokens, planned.shards) == (made.samples, made.tokens, made.shards)
    assert planned.bytes == planned.tokens * 32 * 4 * 2 == 2 * planned.bytes_per_slot
    assert planned.tokens_per_s > 0
    assert planned.seconds > 0
    again = plan_only(config, SilentReporter())
    assert (again.tokens, again.seconds) == (0, 0.0)


def test_a_long_sample_is_cut_counted_and_its_mask_with_it(tiny: Any, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * 500}]
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "long", "messages": turns}) + "\n")
    report = run(tiny("llama"), str(path), tmp_path / "o", max_length=64)
    ids, mask, states = samples_of(tmp_path / "o", "4")["long"]
    assert report.truncated == 1
    assert len(ids) == len(mask) == len(states) == 64


def test_a_sample_longer_than_a_batch_runs_alone(tiny: Any, chats: Any, tmp_path: Path) -> None:
    assert run(tiny("llama"), chats(5), tmp_path / "o", batch_tokens=1).samples == 5


def test_states_are_the_same_however_the_batches_fall(tiny: Any, chats: Any, tmp_path: Path) -> None:
    for name, tokens in (("a", 1), ("b", 5000)):
        run(tiny("qwen3"), chats(15), tmp_path / name, batch_tokens=tokens)
    left, right = samples_of(tmp_path / "a", "norm"), samples_of(tmp_path / "b", "norm")
    for name, (_, _, states) in left.items():
        np.testing.assert_allclose(states, right[name][2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "int8"}, "`--dtype int8`"),
        ({"format": "zarr"}, "no store is called `zarr`"),
        ({"compression": "zstd"}, "`--compression zstd` with `--format safetensors`"),
        ({"max_length": 1}, "`--max-length 1` must be at least 2"),
        ({"limit": 0}, "`--limit 0`"),
        ({"batch_tokens": 0}, "`--batch-tokens 0`"),
        ({"layers": "aux,aux"}, None),
        ({"layers": "99"}, r"0\.\.8"),
        ({"device": "tpu7"}, "`--device tpu7`"),
        ({"role_map": ("x",)}, "`--role-map x`"),
        ({"chat_template": "{% for %}"}, None),
    ],
)
def test_a_wrong_setting_is_one_error_and_leaves_nothing(
    settings: dict[str, Any], text: str | None, tiny: Any, chats: Any, tmp_path: Path
) -> None:
    if settings == {"layers": "aux,aux"}:
        assert run(tiny("llama"), chats(3), tmp_path / "o", **settings).samples == 3
        return
    with pytest.raises(SpecctlError, match=text):
        run(tiny("llama"), chats(3), tmp_path / "o", **settings)
    assert not list((tmp_path / "o").rglob("*.safetensors"))


def test_role_pairs_are_checked() -> None:
    assert role_map(["laguna_s=assistant"]) == {"laguna_s": "assistant"}
    with pytest.raises(UsageError, match="NAME=ROLE with a known role"):
        role_map(["laguna_s=robot"])


def test_piped_output_is_tab_separated_and_talk_goes_to_stderr(
    tiny: Any, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    rows = "".join(json.dumps(row) + "\n" for row in chat_rows(4))
    out = tmp_path / "o"
    process = run_cli("extract", tiny("llama"), "-", "--out", out, "--layers", "4", "--device", "cpu", input=rows)
    assert process.returncode == 0, process.stderr
    pairs = dict(line.split("\t") for line in process.stdout.splitlines())
    assert pairs["samples"] == "4 of 4 rows"
    assert "loading LlamaForCausalLM" in process.stderr
    assert "\x1b" not in process.stdout + process.stderr


def test_quiet_json_is_one_object_and_nothing_else(tiny: Any, chats: Any, tmp_path: Path, run_cli: Any) -> None:
    config = tmp_path / "run.toml"
    config.write_text('layers = "0,norm"\nmax-length = 400\ndevice = "cpu"\nlimit = 9\n')
    command = ("extract", tiny("llama"), chats(8), "--out", tmp_path / "o", "--config", config, "--limit", "5")
    process = run_cli(*command, "--json", "--quiet")
    record = json.loads(process.stdout)
    assert (process.returncode, process.stderr) == (0, "")
    assert record["report"]["slots"] == ["0", "norm"]
    assert record["report"]["samples"] == 5, "a flag wins over the file"
    assert read_manifest(tmp_path / "o").settings["max_length"] == 400


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{target}", "missing.jsonl", "--out", "{out}"], "missing.jsonl"),
        (["{target}", "{data}"], "`--out` is missing"),
        (["no/such", "{data}", "--out", "{out}"], "no/such"),
        (["{target}", "{data}", "--out", "{data}"], "cannot write"),
        (["{target}", "{data}", "--out", "{out}", "--pp", "2", "--tp", "2"], "`--pp 2` with `--tp 2`"),
        (["{target}", "{data}", "--verify", "{out}"], "`--verify` takes no DATA"),
        (["--verify", "{out}"], "no shard folder"),
    ],
)
def test_a_users_mistake_is_one_sentence_a_hint_and_exit_2(
    arguments: list[str], text: str, tiny: Any, chats: Any, tmp_path: Path, run_cli: Any
) -> None:
    places = {"target": tiny("llama"), "data": chats(3), "out": str(tmp_path / "o")}
    process = run_cli("extract", *(word.format(**places) for word in arguments))
    assert process.returncode == 2
    assert process.stderr.startswith("error: ")
    assert text in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


def test_an_unknown_row_is_named_with_its_line(tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "laguna_s", "content": "b"}]}\n')
    with pytest.raises(SpecctlError) as caught:
        run(tiny("llama"), str(path), tmp_path / "o")
    assert "laguna_s" in caught.value.message
    assert run(tiny("llama"), str(path), tmp_path / "o", role_map=("laguna_s=assistant",)).samples == 1
    assert Dropped("x", "y").detail == ""

"""`specctl extract --engine vllm`: what a server hands out, in the right slots of the right samples, or refused."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, chat_rows
from safetensors.numpy import load_file, save_file
from statesserver import bits, states_of

from specctl.core.folder import read_manifest
from specctl.core.recompute import to_torch
from specctl.core.target import describe_target
from specctl.engines._vllmstates import read_states
from specctl.errors import MachineError, NotSupportedError, SettingsChangedError, SpecctlError, UsageError
from specctl.plugins import load_store
from specctl.recipes.dryrun import plan_only
from specctl.recipes.extract import extract
from specctl.records.extraction import ExtractConfig, StatesPlan
from specctl.records.progress import SilentReporter
from specctl.records.shard import SHARDS

QUIET = SilentReporter()
FAKE = f"{sys.executable} {ROOT / 'tests' / 'statesserver.py'} serve"
LAST = 8
"""Layers of the tiny target."""


@pytest.fixture
def config(tiny, tmp_path: Path) -> ExtractConfig:
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(6)))
    return ExtractConfig(
        tiny("llama"),
        (str(data),),
        str(tmp_path / "states"),
        layers="5,2,last,norm",
        dtype="float32",
        engine="vllm",
        server_command=FAKE,
    )


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-4), ("bfloat16", 0.02), ("float16", 2e-3)])
def test_each_slot_of_each_sample_holds_its_own_layer_and_the_norm_is_the_targets(
    dtype: str, error: float, config: ExtractConfig
) -> None:
    extract(replace(config, dtype=dtype), QUIET)
    folder = Path(config.out)
    manifest = read_manifest(folder)
    assert manifest.settings["engine"] == {"vllm": {"vllm": "0.32.0"}}
    weight = load_file(Path(config.target) / "model.safetensors")["model.norm.weight"].astype(np.float64)
    for entry in manifest.shards:
        shard = load_store("safetensors").open_shard(folder / SHARDS / entry.file, entry)
        ids = shard.input_ids()
        for slot, layer in (("2", 2), ("5", 5), (str(LAST), LAST)):
            np.testing.assert_array_equal(shard.slot(slot), bits(states_of(ids, [layer]), dtype)[:, 0])
        last = states_of(ids, [LAST])[:, 0].astype(np.float64)
        normed = last / np.sqrt((last**2).mean(-1, keepdims=True) + 1e-5) * weight
        found = to_torch(shard.slot("norm"), dtype).double().numpy()
        np.testing.assert_allclose(found, normed, rtol=error, atol=error)


def test_an_answer_may_be_larger_than_what_is_read_of_a_table(tmp_path: Path, config: ExtractConfig) -> None:
    """Five boundaries of 2,048 tokens at a width of 2,048 are 80 MiB."""
    spec = replace(describe_target(config.target), hidden_size=2048)
    plan = StatesPlan(config, spec, (1, 2, 3, 4, 5), "float32", 2048)
    path = tmp_path / "answer.safetensors"
    states = np.zeros((2048, 5, 2048), np.float32)
    save_file({"hidden_states": states, "token_ids": np.arange(2048)}, path)
    piece = read_states("0", path, plan, tmp_path)
    assert piece.states["5"].shape == (2048, 2048) and not path.exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("short", "are not its own: .* states for .* tokens; turn prefix caching off"),
        ("tokens", "the states belong to other tokens"),
        ("layers", r"the server's states are F32 \[\d+, 2, 32\]; expected F32 of 3 layers"),
        ("dtype", r"the server's states are F16 .*; expected F32"),
        ("nowhere", "the answer has no `hidden_states_path`"),
        ("outside", "the server put its states at"),
    ],
)
def test_states_that_are_not_those_of_their_sample_end_the_run(
    wrong: str, message: str, config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE", wrong)
    with pytest.raises(MachineError, match=message):
        extract(config, QUIET)
    assert not read_manifest(Path(config.out)).shards


def test_a_folder_holds_the_states_of_one_engine(config: ExtractConfig) -> None:
    extract(config, QUIET)
    with pytest.raises(SettingsChangedError, match="engine"):
        extract(replace(config, engine="reference", server_command=None), QUIET)
    again = extract(config, QUIET)
    assert again is not None and again.new_tokens == 0


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"layers": "0,2"}, NotSupportedError, "overwrites layer 0"),
        ({"pp": 2}, NotSupportedError, "no hidden states over pipeline stages"),
        ({"engine": "sglang"}, NotSupportedError, "hands out no hidden states"),
        ({"device": "cpu"}, UsageError, "`--device` has no meaning with `--engine vllm`"),
        ({"batch_tokens": 64}, UsageError, "`--batch-tokens` has no meaning"),
        ({"engine": "reference"}, UsageError, "`--server-command` is for servers"),
        ({"server_command": "no-such-program serve"}, UsageError, "there is no such program"),
    ],
)
def test_what_the_engine_cannot_do_is_said_before_anything_starts(
    changes: dict, kind: type[SpecctlError], message: str, config: ExtractConfig
) -> None:
    with pytest.raises(kind, match=message):
        extract(replace(config, **changes), QUIET)
    assert not Path(config.out).exists()


def test_a_sample_that_fills_the_context_is_refused_before_the_server_starts(config: ExtractConfig) -> None:
    """A request has to ask for a token, and vLLM refuses one that has no room for it."""
    long = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "word " * 600}]}
    Path(config.data[0]).write_text(json.dumps(long) + "\n")
    with pytest.raises(UsageError, match="a sample of 512 tokens leaves no room") as caught:
        extract(replace(config, max_length=512), QUIET)
    assert caught.value.hint == "`--max-length 511`"


def test_a_release_that_was_never_read_is_refused(config: ExtractConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_VERSION", "0.20.1")
    with pytest.raises(NotSupportedError, match=r"known of vLLM 0.32 and newer, and this is 0.20.1"):
        extract(config, QUIET)


def test_a_dry_run_measures_specctls_own_engine_alone(config: ExtractConfig) -> None:
    with pytest.raises(NotSupportedError, match="`--dry-run` measures specctl's own engine"):
        plan_only(config, QUIET)

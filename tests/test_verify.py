"""`verify` proves a folder: it finds what is damaged, and what is whole and means something else."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from conftest import chat_rows
from train_parts import extracted

from fixtures.make import IDS, VOCAB_SIZE, fill, make_tiny, tokenizer
from specctl import plugins
from specctl.cli.app import run
from specctl.core import folder as folders
from specctl.errors import InputError, ShardError
from specctl.recipes.extract import ExtractConfig, extract
from specctl.recipes.verify import VerifyConfig, VerifyReport, verify
from specctl.records.progress import SilentReporter
from specctl.records.shard import ShardLayout

LAYERS = "0,4,last,norm"
FORMATS = ("safetensors", "parquet")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four chats."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    turns = [("hi", "hello there"), ("and?", "so it goes on and on"), ("why", "no"), ("the tide", "is out at noon")]
    rows = [
        {"id": f"s{i}", "messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
        for i, (ask, answer) in enumerate(turns)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def made(data: str, tiny: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder extracted in fp32 with the given options; each is made once and must stay as it is."""
    done: dict[tuple[tuple[str, str], ...], Path] = {}

    def make(**options: str) -> Path:
        key = tuple(sorted(options.items()))
        if key not in done:
            out = tmp_path_factory.mktemp("made") / "states"
            given = {"layers": LAYERS, "dtype": "float32", **options}
            extract(ExtractConfig(tiny("llama"), (data,), str(out), **given), SilentReporter())
            done[key] = out
        return done[key]

    return make


@pytest.fixture
def copied(made: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of such a folder, to be spoiled."""

    def copy(**options: str) -> Path:
        return Path(shutil.copytree(made(**options), tmp_path / "states"))

    return copy


def states_of(folder: Path) -> dict[str, Any]:
    """The states of a folder's first shard, as arrays that can be written."""
    manifest = folders.read_manifest(folder)
    shard = plugins.load_store(manifest.settings["format"]).open_shard(folder / "shards" / manifest.shards[0].file)
    return {slot: np.array(shard.slot(slot)) for slot in shard.layout.slots}


def rewrite(folder: Path, states: dict[str, Any]) -> None:
    """Put other states into a folder's first shard, and the manifest right about its bytes."""
    manifest = folders.read_manifest(folder)
    store = plugins.load_store(manifest.settings["format"])
    entry = manifest.shards[0]
    path = folder / "shards" / entry.file
    shard = store.open_shard(path)
    names = [name.encode() for name in shard.sample_ids]
    width = max(map(len, names))
    small = {name: np.array(getattr(shard, name)()) for name in ("offsets", "input_ids", "loss_mask")}
    small["sample_ids"] = np.array([list(n.ljust(width, b"\0")) for n in names], np.uint8)
    layout: ShardLayout = shard.layout
    path.unlink()
    store.write(path, layout, small, states)
    changed = replace(entry, bytes=path.stat().st_size, checksum=folders.sha256(path))
    folders.write_manifest(folder, replace(manifest, shards=(changed, *manifest.shards[1:])))


def check(folder: Path, target: str | None = None) -> VerifyReport:
    return verify(VerifyConfig(str(folder), target), SilentReporter())


@pytest.mark.parametrize("format", FORMATS)
def test_an_untouched_folder_is_proven(made: Callable[..., Path], format: str) -> None:
    report = check(made(format=format))
    assert report.ok
    assert (report.shards, report.samples) == (1, 4)
    assert report.recomputed == ()


@pytest.mark.parametrize("format", FORMATS)
def test_an_untouched_folder_is_what_its_target_gives(
    made: Callable[..., Path], tiny: Callable[[str], str], format: str
) -> None:
    report = check(made(format=format), tiny("llama"))
    assert report.ok, report.faults
    assert [match.slot for match in report.recomputed] == ["0", "4", "norm"]
    assert set(report.logits) == {"last", "norm"}
    assert max(report.logits.values()) < 1e-6
    assert report.recomputed_samples == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_16_bit_folder_is_what_its_target_gives(
    made: Callable[..., Path], tiny: Callable[[str], str], dtype: str
) -> None:
    assert check(made(dtype=dtype), tiny("llama")).faults == ()


@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_inf_are_listed_by_sample_slot_and_count(copied: Callable[..., Path], format: str) -> None:
    """Source: vllm-project/speculators#615: one NaN in a shard spoils a training run without a word."""
    folder = copied(format=format)
    manifest = folders.read_manifest(folder)
    shard = plugins.load_store(format).open_shard(folder / "shards" / manifest.shards[0].file)
    ids, offsets = list(shard.sample_ids), shard.offsets()
    states = states_of(folder)
    states["4"][offsets[2] + 1, 3] = np.nan
    states["norm"][offsets[3], :2] = np.inf
    rewrite(folder, states)
    report = check(folder)
    assert not report.ok
    assert sorted(report.faults) == sorted(
        [
            f"{manifest.shards[0].file}: sample `{ids[2]}`, slot 4: 1 values are NaN or infinite",
            f"{manifest.shards[0].file}: sample `{ids[3]}`, slot norm: 2 values are NaN or infinite",
        ]
    )


def test_a_folder_that_is_not_ok_exits_1_and_an_ok_one_0(
    copied: Callable[..., Path], made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied()
    states = states_of(folder)
    states["0"][0, 0] = np.inf
    rewrite(folder, states)
    assert run(["extract", "--verify", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert "slot 0: 1 values are NaN or infinite" in told["report"]["faults"][0]
    assert run(["extract", "--verify", str(made())]) == 0
    assert "verdict\tok" in capsys.readouterr().out


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("place", [0.02, 0.3, 0.6, 0.98])
def test_a_flipped_bit_names_the_file(copied: Callable[..., Path], format: str, place: float) -> None:
    folder = copied(format=format)
    path = next((folder / "shards").iterdir())
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * place)] ^= 0x10
    path.write_bytes(raw)
    report = check(folder)
    assert len(report.faults) == 1
    assert report.faults[0].startswith(f"{path.name}: ")


@pytest.mark.parametrize("format", FORMATS)
def test_a_cut_shard_names_the_file_and_both_sizes(copied: Callable[..., Path], format: str) -> None:
    folder = copied(format=format)
    path = next((folder / "shards").iterdir())
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-16])
    assert check(folder).faults == (f"{path.name}: the shard has {size - 16} bytes; {size} were written",)


def test_a_missing_and_an_unlisted_shard_are_named(copied: Callable[..., Path]) -> None:
    folder = copied()
    path = next((folder / "shards").iterdir())
    path.rename(path.with_stem("00009"))
    faults = check(folder).faults
    assert faults == ("00009.safetensors: not listed in the manifest", f"{path.name}: the shard is missing")


def test_an_unfinished_folder_is_not_ok(copied: Callable[..., Path]) -> None:
    folder = copied()
    folders.write_manifest(folder, replace(folders.read_manifest(folder), is_complete=False))
    assert "did not finish" in check(folder).faults[0]


def test_swapped_norm_and_last_are_found(copied: Callable[..., Path], tiny: Callable[[str], str]) -> None:
    """Every number is finite and every checksum right; only the target tells."""
    folder = copied()
    states = states_of(folder)
    states["8"], states["norm"] = states["norm"], states["8"]
    rewrite(folder, states)
    assert check(folder).ok
    faults = check(folder, tiny("llama")).faults
    assert any(fault.startswith("slot norm is not what the target gives") for fault in faults)
    assert any(fault.startswith("logits rebuilt from norm differ") for fault in faults)
    assert any(fault.startswith("logits rebuilt from last differ") for fault in faults)


def test_a_slot_shifted_by_one_layer_is_found(
    copied: Callable[..., Path], made: Callable[..., Path], tiny: Callable[[str], str]
) -> None:
    folder = copied()
    states = states_of(folder) | {"4": states_of(made(layers="0,5,last,norm"))["5"]}
    rewrite(folder, states)
    faults = check(folder, tiny("llama")).faults
    assert len(faults) == 1 and faults[0].startswith("slot 4 is not what the target gives")


def test_one_spoiled_sample_is_found_among_good_ones(copied: Callable[..., Path], tiny: Callable[[str], str]) -> None:
    folder = copied()
    states = states_of(folder)
    states["4"][-1] *= -1
    rewrite(folder, states)
    faults = check(folder, tiny("llama")).faults
    assert len(faults) == 1 and faults[0].startswith("slot 4 is not what the target gives: cosine >= -1.0")


def test_a_small_offset_is_told_apart_from_rounding(copied: Callable[..., Path], tiny: Callable[[str], str]) -> None:
    """The largest difference comes from any sample, not from the one with the worst cosine."""
    folder = copied()
    states = states_of(folder)
    states["4"][0] *= 2  # the direction stays, so the cosine does
    rewrite(folder, states)
    report = check(folder, tiny("llama"))
    found = next(match for match in report.recomputed if match.slot == "4")
    assert not found.is_equal
    assert len(report.faults) == 1 and "100.00% of a state" in report.faults[0]
    assert found.max_difference == pytest.approx(np.abs(states["4"][0]).max() / 2, rel=1e-4)


def test_states_of_other_weights_are_refused(made: Callable[..., Path], tmp_path: Path) -> None:
    other = make_tiny("llama", tmp_path / "other", seed=1)
    with pytest.raises(InputError, match="the weights are not those") as caught:
        check(made(), str(other))
    assert "llama" in str(caught.value.hint)


def test_what_is_no_shard_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=re.escape("holds no `manifest.json`")):
        check(tmp_path)
    with pytest.raises(ShardError, match="is no folder"):
        check(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_text('{"format_version": 1}')
    with pytest.raises(ShardError, match="is not a manifest of specctl"):
        check(tmp_path)


def test_a_state_space_model_that_lists_its_states_from_the_first_layers_output_on_is_proven(tmp_path: Path) -> None:
    """Mamba's `hidden_states[0]` is what layer 0 gives, not what it takes."""
    model = tf.MambaForCausalLM(
        tf.MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, state_size=4, num_hidden_layers=3, **IDS)
    )
    with torch.no_grad():
        fill(model, 0)
    model.save_pretrained(tmp_path / "mamba")
    tokenizer().save_pretrained(tmp_path / "mamba")
    target = str(tmp_path / "mamba")
    shards = extracted(target, chat_rows(4), tmp_path, layers="all,norm")
    report = verify(VerifyConfig(shards, target=target), SilentReporter())
    assert report.faults == ()
    assert {match.slot for match in report.recomputed} == {"1", "2", "3", "norm"}

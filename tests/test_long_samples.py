"""Samples and ids that are longer than there is room for: cut where nothing lies further on, and said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from talk import Talk

from fixtures.make import make_tiny
from specctl.core.folder import read_manifest, write_manifest
from specctl.core.positions import read_positions
from specctl.core.target import describe_target
from specctl.plugins import load_store
from specctl.recipes.extract import ExtractConfig, ExtractReport, extract

GPT2_POSITIONS, LLAMA_POSITIONS = 256, 512

Run = Callable[..., ExtractReport]


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., str]:
    """DATA of one pre-tokenised sample per length, or of chats under the ids given."""

    def write(*lengths: int, ids: tuple[str, ...] = ()) -> str:
        tokens = [{"id": f"s{n}", "input_ids": [i % 200 for i in range(n)], "loss_mask": [1] * n} for n in lengths]
        named = [{"id": name, "input_ids": [1, 2, i], "loss_mask": [0, 1, 1]} for i, name in enumerate(ids)]
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in tokens + named))
        return str(path)

    return write


@pytest.fixture
def heard() -> Talk:
    return Talk()


@pytest.fixture
def run(tmp_path: Path, heard: Talk) -> Run:
    def run_it(family: str, data: str, **options: Any) -> ExtractReport:
        config = ExtractConfig(str(make_tiny(family)), (data,), str(tmp_path / "o"), layers="0,norm", **options)
        report = extract(config, heard)
        assert report is not None
        return report

    return run_it


def lengths(folder: Path) -> dict[str, int]:
    """Tokens of every stored sample, and that its mask is as long."""
    found = {}
    for entry in read_manifest(folder).shards:
        shard = load_store("safetensors").open_shard(folder / "shards" / entry.file, entry)
        offsets, mask, ids = shard.offsets(), shard.loss_mask(), shard.input_ids()
        assert len(mask) == len(ids) == offsets[-1]
        found |= {name: int(offsets[i + 1] - offsets[i]) for i, name in enumerate(shard.sample_ids)}
    return found


@pytest.mark.parametrize("asked", [2048, 300])
def test_samples_end_at_the_last_learned_position(
    run: Run, rows: Callable[..., str], heard: Talk, tmp_path: Path, asked: int
) -> None:
    report = run("gpt2", rows(60, GPT2_POSITIONS, 400, 700), max_length=asked)
    assert report.truncated == 2
    assert lengths(tmp_path / "o") == {"s60": 60, "s256": 256, "s400": 256, "s700": 256}
    assert heard.warnings == [
        "samples are cut to 256 tokens, the target's number of positions, which is less than "
        f"`--max-length {asked}`; cut: 2"
    ]


def test_rope_is_cut_at_the_trained_length_unless_another_one_is_chosen(
    run: Run, rows: Callable[..., str], heard: Talk, tmp_path: Path
) -> None:
    data = rows(60, 700)
    assert run("llama", data).truncated == 1
    assert lengths(tmp_path / "o") == {"s60": 60, "s700": LLAMA_POSITIONS}
    assert "cut to 512 tokens" in heard.warnings[0] and "`--max-length 2048`" in heard.warnings[0]
    assert run("llama", data, max_length=1024, overwrite=True).truncated == 0
    assert lengths(tmp_path / "o") == {"s60": 60, "s700": 700}
    assert heard.warnings[1:] == [
        "`--max-length 1024` is more than the 512 positions that the target was made for; "
        "longer samples, left as they are: 1"
    ]


@pytest.mark.parametrize(("family", "options"), [("gpt2", {}), ("llama", {}), ("llama", {"max_length": 1024})])
def test_short_samples_say_nothing_and_a_folder_made_before_goes_on(
    run: Run, rows: Callable[..., str], heard: Talk, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    data = rows(60, 90)
    run(family, data, **options)
    manifest = read_manifest(tmp_path / "o")
    assert manifest.settings["max_length"] == options.get("max_length", 2048)
    older = {key: value for key, value in manifest.settings.items() if key != "role_map"}
    write_manifest(tmp_path / "o", type(manifest)(older, manifest.provenance, manifest.shards, is_complete=True))
    assert run(family, data, **options).new_tokens == 0
    assert heard.warnings == []


def test_a_dry_run_says_where_samples_are_cut(run_cli: Any, tiny: Any, rows: Callable[..., str]) -> None:
    process = run_cli("extract", tiny("gpt2"), rows(60, 400), "--layers", "0,norm", "--dry-run", "--device", "cpu")
    assert process.returncode == 0, process.stderr
    assert "samples are cut to 256 tokens" in process.stderr
    assert "1 cut to length" in process.stdout


@pytest.mark.parametrize(("family", "is_table"), [("gpt2", True), ("llama", False)])
def test_positions_are_a_table_only_where_the_model_has_one(family: str, is_table: bool) -> None:
    found = read_positions(describe_target(str(make_tiny(family))), 4096)
    assert found is not None and found.is_table is is_table
    assert read_positions(describe_target(str(make_tiny(family))), 64) is None


def test_one_very_long_id_does_not_pad_all_others(run: Run, rows: Callable[..., str], tmp_path: Path) -> None:
    ids = ("x" * 200_000 + "a", "x" * 200_000 + "b", "\u00e9" * 600, "y" * 1024, "z")
    run("llama", rows(ids=ids))
    found = list(lengths(tmp_path / "o"))
    assert len(found) == 5 and {"z", "y" * 1024} <= set(found)
    assert all(len(name.encode()) <= 1024 for name in found)
    assert sum(name.startswith("x" * 900) for name in found) == 2
    assert sum(name.startswith("\u00e9" * 400) for name in found) == 1
    assert run("llama", rows(ids=ids)).new_tokens == 0

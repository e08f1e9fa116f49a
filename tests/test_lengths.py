"""Rotary embeddings that depend on the longest row: a sample's states are those of the sample alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_parts import extracted

from fixtures.make import make_tiny
from specctl.core.decode import decode_here
from specctl.core.folder import read_manifest
from specctl.core.lengths import LengthRule, length_rule
from specctl.core.plan import cut_batches
from specctl.core.speculate import DecodeSettings, Request
from specctl.core.target import describe_target, load_target
from specctl.plugins import load_store
from specctl.recipes.verify import VerifyConfig, verify
from specctl.records.progress import SilentReporter

CPU, BORDER = torch.device("cpu"), 48
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": BORDER,
    },
}


def target_with(kind: str, folder: Path) -> str:
    """A tiny Llama whose rotary embedding changes beyond 48 tokens."""
    shutil.copytree(make_tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    longest = BORDER if kind == "dynamic" else 4 * BORDER
    config |= {"max_position_embeddings": longest, "rope_parameters": ROPES[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def chats(lengths: list[int]) -> list[dict[str, Any]]:
    """Rows of so many letters, which are tokens of their own."""
    text = "abcdefghij" * 40
    return [
        {"id": f"r{n}", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text[:n]}]}
        for n in lengths
    ]


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_states_do_not_depend_on_neighbours_or_on_what_was_read_before(kind: str, tmp_path: Path) -> None:
    """huggingface/transformers#25104: frequencies of the longest row so far went into every later one."""
    target = target_with(kind, tmp_path / "target")
    rows = chats([22, 24, 26, 28, 30, 34, 38, 60, 62, 64, 90])
    shards = extracted(target, rows, tmp_path, layers="0,4,norm", max_length=BORDER * 4)
    spec, manifest = describe_target(target), read_manifest(Path(shards))
    lengths = []
    for entry in manifest.shards:
        shard = load_store("safetensors").open_shard(Path(shards) / "shards" / entry.file, entry)
        offsets, ids, found = shard.offsets(), shard.input_ids(), shard.slot("4")
        for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            model: Any = load_target(spec, dtype="float32", device=CPU).model  # fresh: nothing was read before
            tokens = torch.tensor(ids[begin:end].tolist())[None]
            with torch.inference_mode():
                alone = model(tokens, output_hidden_states=True, use_cache=False).hidden_states[4][0]
            torch.testing.assert_close(torch.tensor(found[begin:end].copy()), alone, rtol=1e-4, atol=1e-5)
            lengths.append(end - begin)
    assert min(lengths) < BORDER < max(lengths)
    assert verify(VerifyConfig(shards, target=target), SilentReporter()).faults == ()


def test_a_text_does_not_depend_on_prompts_before_it(tmp_path: Path) -> None:
    target = load_target(describe_target(target_with("dynamic", tmp_path / "t")), dtype="float32", device=CPU)
    long, short = Request("long", tuple(range(1, 120))), Request("short", tuple(range(7, 60)))
    settings = DecodeSettings(8)
    alone = decode_here(target, None, [short], settings=settings)[0].tokens
    assert decode_here(target, None, [long, short], settings=settings)[1].tokens == alone


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}, LengthRule(64, True)),
        (
            {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 32, "max_position_embeddings": 64},
            LengthRule(32, False),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 16}}},
            LengthRule(16, False),
        ),
    ],
)
def test_a_configuration_says_which_rows_touch_each_other(text: Any, rule: LengthRule | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **text}))
    assert length_rule(str(tmp_path)) == rule


def test_batches_are_cut_at_the_border_and_beyond_it_by_length() -> None:
    lengths = [70, 70, 66, 65, 64, 63, 60]
    assert cut_batches(lengths, batch_tokens=10_000) == [(0, 6), (6, 7)]
    assert cut_batches(lengths, batch_tokens=10_000, rule=LengthRule(64, False)) == [(0, 4), (4, 7)]
    graded = cut_batches(lengths, batch_tokens=10_000, rule=LengthRule(64, True))
    assert graded == [(0, 2), (2, 3), (3, 4), (4, 7)]

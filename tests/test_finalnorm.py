"""The final norm alone makes the teacher's states from the last boundary, for shards without `norm`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import chat_rows

from specctl.core.corpus import Corpus
from specctl.core.finalnorm import read_final_norm
from specctl.core.teaching import read_parts
from specctl.core.trainsetup import prepare
from specctl.errors import ShardError
from specctl.recipes.extract import extract
from specctl.recipes.train import train
from specctl.records.extraction import ExtractConfig
from specctl.records.progress import SilentReporter
from specctl.records.training import TrainConfig

QUIET = SilentReporter()
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "moe", "hybrid", "multimodal", "gpt2")


def states(target: str, folder: Path, layers: str, dtype: str = "float32") -> str:
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(12)))
    out = folder / layers.replace(",", "-")
    extract(ExtractConfig(target, (str(data),), str(out), layers=layers, dtype=dtype), QUIET)
    return str(out)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((name, "float32") for name in FAMILIES), ("llama", "bfloat16"), ("gemma3", "bfloat16")]
)
def test_the_last_boundary_and_the_norm_give_the_stored_norm(family, dtype, tiny, tmp_path) -> None:
    target = tiny(family)
    folder = Path(states(target, tmp_path, "1,last,norm", dtype))
    parts = read_parts(target)
    stored = Corpus([folder], (1,))
    last = str(stored.manifests[0].settings["num_layers"])
    made = Corpus([folder], (1,), final_norm=read_final_norm(parts))
    assert last in stored.manifests[0].slots
    for place in stored.places[:4]:
        assert torch.equal(made.sample(place).final, stored.sample(place).final)


def test_a_run_on_shards_without_norm_is_that_of_shards_with_it(tiny, tmp_path) -> None:
    target = tiny("llama")
    config = TrainConfig(
        shards=(states(target, tmp_path, "2,4,last,norm"),),
        target=target,
        out=str(tmp_path / "with"),
        layers="2,4",
        draft_vocab_size=64,
        max_steps=3,
        batch_tokens=256,
        eval_fraction=0.0,
    )
    train(config, QUIET)
    bare = replace(config, shards=(states(target, tmp_path, "2,4,last"),), out=str(tmp_path / "without"))
    train(bare, QUIET)
    one, other = (Path(run.out) / "draft" / "model.safetensors" for run in (config, bare))
    assert one.read_bytes() == other.read_bytes()


def test_shards_with_neither_are_refused(tiny, tmp_path) -> None:
    target = tiny("llama")
    config = TrainConfig(shards=(states(target, tmp_path, "2,4"),), target=target, out=str(tmp_path / "run"))
    with pytest.raises(ShardError, match="no slot `norm`"):
        prepare(config, torch.device("cpu"))

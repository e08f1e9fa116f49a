"""What tests of training share: states of a tiny Llama, extracted by specctl itself, and a small run over them."""

import json
from pathlib import Path
from typing import Any

from specctl.recipes.extract import extract
from specctl.records.extraction import ExtractConfig
from specctl.records.progress import SilentReporter
from specctl.records.training import TrainConfig


def extracted(target: str, rows: list[dict[str, Any]], folder: Path, **settings: Any) -> str:
    """The states of `rows`, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"layers": "2,4,last,norm", "dtype": "float32", **settings}
    extract(ExtractConfig(target, (str(data),), str(folder / "states"), **asked), SilentReporter())
    return str(folder / "states")


def one_step(target: str, shards: str, out: Path) -> TrainConfig:
    """A run of one step over all samples, with a reduced vocabulary."""
    return TrainConfig(
        shards=(shards,),
        target=target,
        out=str(out),
        draft_vocab_size=64,
        max_steps=1,
        batch_tokens=256,
        eval_fraction=0.0,
    )

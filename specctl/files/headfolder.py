"""A checkpoint as files: one model.safetensors and, after it, its config.json, both synced. Knows no layout."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from specctl.files import safetensors
from specctl.files.tensors import Source

WEIGHTS: Final = "model.safetensors"


def write_head(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Source],
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write both into `folder`, which is there; `advance` hears of bytes written. Raises OSError, InputError."""
    safetensors.write(folder / WEIGHTS, tensors, {"format": "pt"}, advance=advance)
    with (folder / "config.json").open("w", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())

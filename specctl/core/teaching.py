"""What training reads from the target: its embedding and its head, and nothing else of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl.core import gguf
from specctl.core.logits import logit_rule
from specctl.core.losses import Teacher, make_teacher
from specctl.core.target import resolve, weights_fingerprint
from specctl.errors import NotSupportedError, TargetError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.target import HEADS, TargetFiles, read_target
from specctl.files.tensors import TensorEntry
from specctl.records.target import text_settings

HEAD_BIASES = tuple(name.replace(".weight", ".bias") for name in HEADS)

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class TargetParts:
    """The target's facts and tables: embedding and head [V, D] as stored (a tied head is the embedding).

    `fingerprint` is that of its weight files, as shards record it.
    """

    files: TargetFiles
    embedding: torch.Tensor
    head: torch.Tensor
    scale: float
    softcap: float | None
    settings: Mapping[str, Any]
    fingerprint: str


def read_parts(name: str, revision: str | None = None) -> TargetParts:
    """The parts of a target that training needs, mapped, not loaded. Raises TargetError, NotSupportedError."""
    folder, gguf_file = resolve(name, revision)
    fingerprint = weights_fingerprint(folder, gguf_file)
    if gguf_file is not None:
        from huggingface_hub.constants import HF_HOME

        cache = Path(HF_HOME) / "specctl" / "gguf"
        folder = gguf.dequantize(folder / gguf_file, cache, fingerprint)
    files = read_target(folder, None if Path(name).exists() else name)
    if files.embedding is None or files.lm_head is None:
        what = "embedding" if files.embedding is None else "head"
        raise TargetError(f"the target's weights hold no {what} that can be found", where=str(folder))
    _refuse_bias(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _, text = text_settings(raw)
    rule = logit_rule(_configured(folder) or text)
    return TargetParts(
        files=files,
        embedding=mapped(files.embedding),
        head=mapped(files.lm_head),
        scale=rule.scale,
        softcap=rule.cap,
        settings=text,
        fingerprint=fingerprint,
    )


def teacher_of(
    parts: TargetParts, vocabulary: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> Teacher:
    """The target's head as the teacher of a draft over `vocabulary` (int64 [W], rising; None: all), in `dtype`.

    On the CPU the whole head stays in its mapped file.
    """
    ids = None if vocabulary is None else vocabulary.to(device)
    return make_teacher(parts.head.to(device), ids, dtype=dtype, scale=parts.scale, softcap=parts.softcap)


def mapped(entry: TensorEntry) -> torch.Tensor:
    """A tensor of a file, mapped read-only. Raises TargetError for a dtype that is none of floats."""
    if entry.dtype not in _TORCH:
        raise TargetError(
            f"`{entry.name}` of the target has dtype {entry.dtype}; embedding and head must be bf16, fp16 or fp32",
            where=str(entry.path),
        )
    dtype = _TORCH[entry.dtype]
    flat = torch.from_file(str(entry.path), shared=False, size=entry.path.stat().st_size, dtype=torch.uint8)
    data = flat[entry.begin : entry.begin + entry.nbytes]
    # The format promises no alignment, and torch views none that is not.
    data = data if entry.begin % dtype.itemsize == 0 else data.clone()
    return data.view(dtype).reshape(entry.shape)


def _configured(folder: Path) -> Any:
    """The text configuration with its class's defaults, or None where transformers has no such class."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder).get_text_config()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _refuse_bias(folder: Path) -> None:
    """Raises NotSupportedError for a head that adds a bias, as Phi's: no draft's head has one to learn it with."""
    names = open_checkpoint(folder, lambda name: name.endswith(HEAD_BIASES)).tensors
    found = [name for name in names if name.endswith(HEAD_BIASES)]
    if found:
        raise NotSupportedError(f"the target's head has the bias `{found[0]}`", where=str(folder))

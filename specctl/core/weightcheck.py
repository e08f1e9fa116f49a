"""Whether a target's weights are what its model takes. transformers fills, skips and casts without an error.

A tensor that is left out or read as another kind of number gives states that look right and are not. Facts as
run with transformers 5.24: an unknown `quant_method` is skipped with a note in the log, float8 is cast without its
scales (NVIDIA/TensorRT-Model-Connect#1115), and biases that the configuration does not state are dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from specctl.errors import InputError, NotSupportedError, TargetError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.tensors import TensorEntry
from specctl.records.target import TargetSpec

SIDE_FILE = "hf_quant_config.json"
"""Where ModelOpt says how weights are quantized, in its older exports there alone."""
PACKED = re.compile(r"F8_.*|F4.*|F6.*|[IU]8|[IU]4")
"""Dtypes of safetensors that hold weights only together with scales."""
FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
LEAVES = (nn.Linear, nn.Embedding)


def quantization_of(folder: Path, settings: Iterable[Mapping[str, Any]]) -> str | None:
    """How weights are quantized, by the first of `settings` (config.json, its text part) or ModelOpt's side file."""
    for config in settings:
        said = config.get("quantization_config")
        if said:
            method = said.get("quant_method") if isinstance(said, Mapping) else None
            return None if method is None else str(method)
    try:
        side = json.loads((folder / SIDE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    has_method = isinstance(side, Mapping) and bool((side.get("quantization") or {}).get("quant_algo"))
    return "modelopt" if has_method else None


def stored_dtype(folder: Path) -> str | None:
    """What the first weight in the files is stored in, where it is a float that models compute in."""
    tensors = _tensors(folder)
    return next((FLOATS[entry.dtype] for entry in tensors.values() if entry.dtype in FLOATS), None)


def _tensors(folder: Path) -> Mapping[str, TensorEntry]:
    """The headers' tensors; none where no file can be read, of which transformers says what is wrong."""
    try:
        return open_checkpoint(folder).tensors
    except InputError:
        return {}


def refuse_packed(spec: TargetSpec) -> None:
    """Raises NotSupportedError for weights that transformers would take for plain numbers. Reads headers alone."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    hint = "use the unquantized weights, or another quantization of them"
    method = spec.quantization
    if method is not None:
        known = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes", "gguf"}
        if method not in known:
            raise NotSupportedError(
                f"the target is quantized with `{method}`, which transformers cannot read: it would take the stored "
                "numbers for the weights themselves",
                where=spec.path,
                hint=hint,
            )
        return
    for name, entry in _tensors(Path(spec.path)).items():
        if PACKED.fullmatch(entry.dtype) and name.endswith("weight") and len(entry.shape) > 1:
            raise NotSupportedError(
                f"`{name}` holds {entry.dtype}, and `config.json` says nothing of a quantization: transformers would "
                "take the stored numbers for the weights themselves",
                where=spec.path,
                hint=f"is `quantization_config` missing from `config.json`? Else {hint}",
            )


def refuse_differing(info: Mapping[str, Any], model: nn.Module, spec: TargetSpec, *, path: str, is_part: bool) -> None:
    """Raises TargetError where checkpoint and model do not have the same tensors; `path` is that of the layers.

    `info` is what transformers says of its loading. Of a part of the model nothing is missing, and tensors that no
    module takes (other towers, drafts for several tokens) are no fault.
    """
    missing = sorted(info.get("missing_keys") or ())
    if missing and not is_part:
        raise TargetError(
            f"the checkpoint lacks {len(missing)} tensors that `{spec.architecture}` has, first `{missing[0]}`",
            where=spec.path,
            hint="they would be filled with random values; is the download complete?",
        )
    mismatched = sorted(info.get("mismatched_keys") or (), key=str)
    if mismatched:
        name, stored, configured = mismatched[0]
        raise TargetError(
            f"`{name}` is {list(stored)} in the checkpoint and {list(configured)} by `config.json`",
            where=spec.path,
            hint="do weights and configuration belong together?",
        )
    _refuse_left_over(sorted(info.get("unexpected_keys") or ()), model, spec, path)


def _refuse_left_over(unexpected: list[str], model: nn.Module, spec: TargetSpec, path: str) -> None:
    quantizer = getattr(model, "hf_quantizer", None)
    modules = dict(model.named_modules())
    # A quantizer has tensors beside the weights that it may or may not need.
    strays = [] if quantizer is not None else [n for n in unexpected if _is_leaf(modules.get(n.rpartition(".")[0]))]
    if strays:
        raise TargetError(
            f"the checkpoint holds `{strays[0]}`{_and_more(strays)}, which `{spec.architecture}` does not take as "
            "`config.json` describes it",
            where=spec.path,
            hint="a bias or scale would be left out; do weights and configuration belong together?",
        )
    deeper = _whole_layers(unexpected, modules, spec, path)
    if deeper:
        raise TargetError(
            f"the checkpoint has a layer {deeper[0]}{_and_more(deeper)}, and `config.json` states {spec.num_layers} "
            f"layers, 0 to {spec.num_layers - 1}",
            where=spec.path,
            hint="do weights and configuration belong together?",
        )


def _is_leaf(module: nn.Module | None) -> bool:
    """Whether a module does one thing with its own tensors, so that another tensor would change what it does."""
    if module is None or not any(True for _ in module.parameters(recurse=False)):
        return False
    return isinstance(module, LEAVES) or type(module).__name__.endswith(("Norm", "Conv1D"))


def _whole_layers(names: list[str], modules: Mapping[str, nn.Module], spec: TargetSpec, path: str) -> list[int]:
    """Layers in the checkpoint beyond the model's last that have the same tensors: those that draft tokens differ."""
    begin = f"{path}."
    last = modules.get(f"{begin}{spec.num_layers - 1}")
    wanted = set() if last is None else set(last.state_dict())
    found: dict[int, set[str]] = {}
    for name in names:
        index, _, rest = name.removeprefix(begin).partition(".")
        if name.startswith(begin) and index.isdecimal() and int(index) >= spec.num_layers:
            found.setdefault(int(index), set()).add(rest)
    return sorted(index for index, has in found.items() if wanted and has == wanted)


def _and_more(found: list[Any]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""

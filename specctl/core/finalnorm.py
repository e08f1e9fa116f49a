"""The target's final norm alone: what takes its last boundary to the state that its head reads.

The module is the target's own class of transformers, because families differ in what a weight means
(Gemma multiplies by 1 + w: vllm-project/speculators#1090); its values are read from the checkpoint, and
nothing else of the model is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from specctl.core.decoder import OTHER_MODALITIES, find_decoder, stream_of
from specctl.core.target import describe_target, empty_model
from specctl.core.teaching import TargetParts, mapped
from specctl.errors import TargetError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.tensors import TensorEntry

FinalNorm = Callable[[torch.Tensor], torch.Tensor]


def read_final_norm(parts: TargetParts, *, trust_remote_code: bool = False) -> FinalNorm:
    """A function from the last boundary [T, D] to the state of slot `norm` [T, D], computed in their dtype.

    Raises TargetError when the target has no norm after its layers that can be told from others.
    """
    folder = parts.files.facts.folder
    spec = describe_target(folder, trust_remote_code=trust_remote_code)
    decoder = find_decoder(empty_model(spec, trust_remote_code=trust_remote_code), spec.num_layers)
    name, module = _norm_after(decoder.caller, decoder.layers, folder)
    module.to_empty(device="cpu")
    module.load_state_dict({key: mapped(_entry(Path(folder), f"{name}.{key}")) for key in module.state_dict()})
    return _Applied(module.requires_grad_(False).eval())


class _Applied:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.no_grad()
    def __call__(self, last_TD: torch.Tensor) -> torch.Tensor:
        out = stream_of(self._module.to(last_TD.dtype)(last_TD[None]))
        assert out is not None
        return out[0]


def _norm_after(caller: nn.Module, layers: nn.ModuleList, folder: str) -> tuple[str, nn.Module]:
    """The norm that `caller` registers after its layers, and its name there."""
    children = list(caller.named_children())
    at = next((i for i, (_, child) in enumerate(children) if child is layers), len(children))
    found = [(name, child) for name, child in children[at:] if "norm" in type(child).__name__.lower()]
    if len(found) != 1:
        raise TargetError(
            f"the target has {len(found)} norms after its layers, so its final one is not known",
            where=folder,
            hint="extract again with `--layers aux,norm`",
        )
    return found[0]


def _entry(folder: Path, name: str) -> TensorEntry:
    """The tensor of the checkpoint that ends in `name` and belongs to no layer and no picture."""

    def is_meant(key: str) -> bool:
        inside = any(f".{part}." in f".{key}" for part in ("layers", "h", *OTHER_MODALITIES))
        return f".{key}".endswith(f".{name}") and not inside

    found = {key: entry for key, entry in open_checkpoint(folder, is_meant).tensors.items() if is_meant(key)}
    if not found:
        raise TargetError(f"the target's weights hold no `{name}`", where=str(folder))
    return found[min(found, key=len)]

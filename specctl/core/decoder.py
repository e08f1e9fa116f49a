"""Finds the decoder layers of a causal LM, whatever wraps them. Knows modules, not weights or files.

Every layout of transformers keeps its decoder layers in one ModuleList of the text model; the list is
known by its length, which the text configuration states, and by not belonging to another modality.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specctl.errors import TargetError

OTHER_MODALITIES = ("vision", "visual", "audio", "image", "speech", "talker", "code_predictor", "mtp")
ENCODER = "encoder"
"""The part of another modality, or, in ChatGLM's own code, the decoder: taken where nothing else fits."""
PLACEHOLDERS = ("PipelineIdentityLayer", "PPMissingLayer", "Identity")


@dataclass(frozen=True, slots=True)
class Decoder:
    """The text model that is called, its layers, and where they are.

    `layers` is the whole list, numbered globally also on a pipeline stage, which owns
    `owned` = [start, end) of it; the others are placeholders.
    """

    caller: nn.Module
    layers: nn.ModuleList
    path: str
    owned: range


def is_placeholder(layer: nn.Module) -> bool:
    """Whether `layer` only holds the place of one that another stage owns."""
    return type(layer).__name__ in PLACEHOLDERS


def find_decoder(model: nn.Module, num_layers: int) -> Decoder:
    """The decoder of `model`, which has `num_layers` layers.

    Raises TargetError naming the class when no ModuleList fits, or more than one.
    """
    fitting = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and _is_text(name)
    ]
    found = [(name, module) for name, module in fitting if ENCODER not in name] or fitting
    # A list inside a layer (experts, say) may have the same length: the outermost is meant.
    outer = [(n, m) for n, m in found if not any(n.startswith(f"{o}.") for o, _ in found)]
    if len(outer) != 1:
        lists = {n: len(m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and "." not in n[-2:]}
        what = "no list of layers" if not outer else f"{len(outer)} lists of layers"
        raise TargetError(
            f"`{type(model).__name__}` has {what} of the length {num_layers} that its configuration states",
            where=", ".join(f"{n} ({k})" for n, k in list(lists.items())[:6]) or None,
            hint="specctl captures at decoder layers kept in one torch ModuleList",
        )
    path, layers = outer[0]
    parent_path = path.rpartition(".")[0]
    assert isinstance(layers, nn.ModuleList)
    return Decoder(_caller(model, parent_path), layers, path, _owned(layers))


def _is_text(path: str) -> bool:
    return not any(word in part for part in path.split(".") for word in OTHER_MODALITIES)


def _caller(model: nn.Module, parent_path: str) -> nn.Module:
    """The innermost module around the layers that takes token ids and is not the whole LM."""
    path = parent_path
    while path:
        module = model.get_submodule(path)
        if "input_ids" in inspect.signature(module.forward).parameters:
            return module
        path = path.rpartition(".")[0]
    return model


def _owned(layers: nn.ModuleList) -> range:
    real = [i for i, layer in enumerate(layers) if not is_placeholder(layer)]
    if not real:
        return range(0)
    if real != list(range(real[0], real[-1] + 1)):
        raise TargetError(f"a stage owns layers {real}, which are not contiguous")
    return range(real[0], real[-1] + 1)


def stream_of(value: Any, residual: Any = None) -> torch.Tensor | None:
    """The residual stream in what a layer takes or gives, or None when there is no float tensor.

    A layer may give (hidden, residual), two tensors of one shape, whose sum is the stream; any other
    tuple leads with the stream. Source: vllm-project/vllm#12099.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return None
        return value + residual if isinstance(residual, torch.Tensor) else value
    if hasattr(value, "last_hidden_state"):
        return stream_of(value.last_hidden_state)
    if isinstance(value, (tuple, list)):
        floats = [v for v in value if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if not floats:
            return None
        has_residual = len(floats) > 1 and floats[1].shape == floats[0].shape
        return floats[0] + floats[1] if has_residual else floats[0]
    return None


def input_stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The residual stream that enters a layer called with `args` and `kwargs`."""
    residual = kwargs.get("residual")
    if "hidden_states" in kwargs:
        return stream_of(kwargs["hidden_states"], residual)
    floats = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    if not floats:
        return None
    # A leading non-float (positions) is the sign of the (positions, hidden, residual) call.
    is_residual_style = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].is_floating_point()
    if residual is None and is_residual_style and len(floats) > 1 and floats[1].shape == floats[0].shape:
        residual = floats[1]
    return stream_of(floats[0], residual)

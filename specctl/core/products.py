"""Products in fp32 on a CPU, by the faster of torch's two libraries.

`torch.mm` takes MKL for fp32. Over a head of 8,192 rows it reaches 87 to 99 GFLOP/s on one AMD core, where
oneDNN reaches 102 to 107; over one row it reads the weights with one core, over a few it is slower still,
and oneDNN takes a half to a quarter of its time. torch has no public door to oneDNN for plain fp32 tensors,
so its private operator is taken where it exists, and torch's own product anywhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import nn

LEAST_WORK = 1 << 29
"""Multiplications from which oneDNN pays once: it makes a kernel for each new shape, in 0.7 ms on that core."""
LEAST_WEIGHT = 1 << 16
"""Numbers of a weight from which it pays in decoding, where a shape comes again with every step."""


def multiply(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b [M, N], in their dtype."""
    if is_for_onednn(a_MK, b_KN):
        return _onednn(a_MK, b_KN.T, None)
    return a_MK @ b_KN


def is_for_onednn(a_MK: torch.Tensor, b_KN: torch.Tensor) -> bool:
    """Whether `multiply` takes oneDNN: large fp32 tensors of a CPU, without gaps, and no gradient to record."""
    if a_MK.shape[0] * b_KN.numel() < LEAST_WORK:
        return False
    # Of other strides oneDNN takes its reference code, a thousand times slower.
    is_packed = a_MK.is_contiguous() and (b_KN.is_contiguous() or b_KN.T.is_contiguous())
    return is_packed and _is_plain(a_MK, b_KN) and _has_onednn()


@contextmanager
def quick_linears(model: nn.Module | None) -> Iterator[None]:
    """Within it, the large fp32 linear layers of a model on a CPU are computed by oneDNN, to fp32's rounding.

    For decoding, which reads few rows at a time and the same shapes again and again. What records a
    gradient, is cast, or has a forward of its own (a shard of tensor parallelism) is left as it is.
    """
    modules = model.modules() if model is not None and _has_onednn() else ()
    layers = [module for module in modules if _is_quick(module)]
    for layer in layers:
        layer.forward = functools.partial(_linear, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_quick(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether this is a linear layer as torch makes it, over a plain tensor that oneDNN can read as it lies."""
    if type(module) is not nn.Linear or "forward" in vars(module):
        return False
    weight = module.weight
    is_large = weight.numel() >= LEAST_WEIGHT
    return type(weight.data) is torch.Tensor and is_large and weight.is_contiguous() and _is_fp32_of_cpu(weight)


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if _is_plain(x, layer.weight):
        return _onednn(x.contiguous(), layer.weight, layer.bias)
    return nn.Linear.forward(layer, x)


def _onednn(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_NK, bias_N, "none", [], "")
    return out


def _is_plain(*pair: torch.Tensor) -> bool:
    """Whether a product of these is fp32 of a CPU, and neither cast nor recorded."""
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in pair)
    return all(map(_is_fp32_of_cpu, pair)) and not is_recorded and not torch.is_autocast_enabled("cpu")


def _is_fp32_of_cpu(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32


@functools.cache
def _has_onednn() -> bool:
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

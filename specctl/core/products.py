"""Large fp32 products on a CPU, by the faster of torch's two libraries.

`torch.mm` takes MKL for fp32, which on one AMD core reaches 87 to 99 GFLOP/s over a head of 8,192 rows
where oneDNN reaches 102 to 107. torch has no public door to oneDNN for plain fp32 tensors, so its private
operator is taken where it exists, and `torch.mm` anywhere else.
"""

from __future__ import annotations

import functools

import torch

LEAST_WORK = 1 << 29
"""Multiplications from which oneDNN pays: it makes a kernel for each new shape, in 0.7 ms on that core."""


def multiply(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """a @ b [M, N], in their dtype."""
    if is_for_onednn(a_MK, b_KN):
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a_MK, b_KN.T, None, "none", [], "")
        return out
    return a_MK @ b_KN


def is_for_onednn(a_MK: torch.Tensor, b_KN: torch.Tensor) -> bool:
    """Whether `multiply` takes oneDNN: large fp32 tensors of a CPU, without gaps, and no gradient to record."""
    pair = (a_MK, b_KN)
    if a_MK.shape[0] * b_KN.numel() < LEAST_WORK:
        return False
    is_plain = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in pair)
    # Of other strides oneDNN takes its reference code, a thousand times slower.
    is_packed = a_MK.is_contiguous() and (b_KN.is_contiguous() or b_KN.T.is_contiguous())
    is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in pair)
    is_cast = torch.is_autocast_enabled("cpu")
    return is_plain and is_packed and not is_recorded and not is_cast and _has_onednn()


@functools.cache
def _has_onednn() -> bool:
    return bool(torch._C._has_mkldnn) and hasattr(torch.ops.mkldnn, "_linear_pointwise")

"""Attention of drafts: what an element of a training forward may see, exactly and in linear memory.

Both drafts have one pattern (core/attentionplan.py): EAGLE-3 computes depth after depth, P-EAGLE all at
once. On the CPU it is core/exactattention.py; on a GPU flex attention, compiled, because flex has no
backward on the CPU.

Legend: N core keys, Q queries, M own keys, H query heads, J key heads, E head dim.
Source: arXiv 2503.01840 section 3 (training-time test), arXiv 2602.01469 section 3 (parallel drafting).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from specctl.core.attentionplan import Plan
from specctl.core.device import is_gpu
from specctl.core.exactattention import attend_exactly

SMALLEST_COMPILED_HEAD = 16

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query [Q, H, E], key [M, J, E], value [M, J, E]) -> [Q, H, E]."""

KeysValues = tuple[torch.Tensor, torch.Tensor]

Bound = Callable[[torch.Tensor, KeysValues, KeysValues | None], torch.Tensor]
"""(query [Q, H, E], core keys and values [N, J, E], own ones [M, J, E] or None) -> [Q, H, E]."""


def bind(plan: Plan, window: int | None) -> Bound:
    """Attention over `plan`.

    With a `window` an element sees only positions less than `window` before its own.
    """
    if is_gpu(plan.anchors_Q.device):
        return bind_flex(plan, window)
    return lambda query, core, own: attend_exactly(query, core, own, plan, window)


def bind_flex(plan: Plan, window: int | None) -> Bound:
    """`bind` by flex attention, on any device; on the CPU it has no gradient."""
    mask: list[Any] = []

    def attend(query: torch.Tensor, core: KeysValues, own: KeysValues | None) -> torch.Tensor:
        if not mask:  # one mask for all layers
            mask.append(_block_mask(plan, core[0].shape[0], window))
        return _flex(query, core, own, mask[0])

    return attend


def attend_cached(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Plain causal attention of the last Q of M positions: [Q, H, E] over [M, J, E]. For decoding."""
    count, length = query.shape[0], key.shape[0]
    places = torch.arange(length, device=query.device)
    ahead = places[None] - places[length - count :, None]
    allowed = (ahead <= 0) & (ahead > -(window or length + 1))
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.transpose(0, 1)[None] for x in (query, *(x.repeat_interleave(group, 1) for x in (key, value))))
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed)[0].transpose(0, 1)


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


def _block_mask(plan: Plan, num_core: int, window: int | None) -> Any:
    """The pattern as a flex mask over keys laid out core first, own after."""
    from torch.nn.attention.flex_attention import create_block_mask

    device = plan.anchors_Q.device
    core = torch.arange(num_core, device=device)
    key_anchors = torch.cat((core, plan.own_anchors_M))
    key_depths = torch.cat((torch.zeros_like(core), plan.own_depths_M))

    def is_seen(_batch: Any, _head: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        anchor, depth, key_anchor, key_depth = plan.anchors_Q[q], plan.depths_Q[q], key_anchors[kv], key_depths[kv]
        in_core = (key_depth == 0) & (key_anchor <= anchor) & (key_anchor >= plan.starts_Q[q])
        seen = in_core | ((key_depth > 0) & (key_anchor == anchor) & (key_depth <= depth))
        return seen if window is None else seen & (anchor + depth - key_anchor - key_depth < window)

    return create_block_mask(is_seen, None, None, plan.anchors_Q.shape[0], key_anchors.shape[0], device=str(device))


def _flex(query: torch.Tensor, core: KeysValues, own: KeysValues | None, mask: Any) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    key, value = core if own is None else (torch.cat(pair) for pair in zip(core, own, strict=True))
    is_compiled = is_gpu(query.device) and query.shape[-1] >= SMALLEST_COMPILED_HEAD
    call = _compiled_flex() if is_compiled else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out: torch.Tensor = call(q, k, v, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1])
    return out[0].transpose(0, 1)

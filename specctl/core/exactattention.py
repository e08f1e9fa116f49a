"""The pattern on the CPU: flash over the core, own columns joined through the log-sum-exp, linear memory.

One flash call per run of queries; nothing of size [queries, keys] outlives a run, forward or backward.
An element that sees nothing gives zeros and takes no gradient.

Legend: N core keys, Q queries, M own keys, H query heads, J key heads, G = H / J, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specctl.core.attentionplan import LONGEST_RUN, Plan, Run


def attend_exactly(
    query: torch.Tensor,
    core: tuple[torch.Tensor, torch.Tensor],
    own: tuple[torch.Tensor, torch.Tensor] | None,
    plan: Plan,
    window: int | None,
) -> torch.Tensor:
    """[Q, H, E] from query [Q, H, E] over core [N, J, E] and own [M, J, E] keys and values."""
    own_key, own_value = (core[0][:0], core[1][:0]) if own is None else own
    out: torch.Tensor = _Exact.apply(query, *core, own_key, own_value, plan, window)  # type: ignore[no-untyped-call]
    return out


class _Exact(torch.autograd.Function):
    """Flash over the core, merged with the own columns; backward runs flash with the merged result.

    Given the merged output and log-sum-exp, the flash backward yields the core's gradients within the
    whole softmax: it only reads p = exp(score - lse) and the row sums of grad * out.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        own_key: torch.Tensor,
        own_value: torch.Tensor,
        plan: Plan,
        window: int | None,
    ) -> torch.Tensor:
        out_QH, lse_QH = _core_forward(query, key, value, plan, window)
        scores = _own_scores(query, own_key, plan, window)
        total_QH = torch.logsumexp(torch.cat((lse_QH[..., None], scores), -1), -1)
        total_QH = total_QH.masked_fill(total_QH.isinf(), 0.0)  # sees nothing: every weight is exp(-inf)
        out = out_QH * (lse_QH - total_QH).exp()[..., None]
        for index, column in enumerate(plan.columns):
            p = (scores[column.rows, :, index] - total_QH[column.rows]).exp()
            out.index_add_(0, column.rows, p[..., None] * _spread(own_value[column.sources], query).to(out.dtype))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, own_key, own_value, out, total_QH)
        ctx.plan, ctx.window = plan, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, own_key, own_value, out, lse = ctx.saved_tensors
        plan, window, exact = ctx.plan, ctx.window, lse.dtype
        dq, dk, dv = _core_backward(grad, query, key, value, out, lse, plan, window)
        own_dk, own_dv = torch.zeros_like(own_key, dtype=exact), torch.zeros_like(own_value, dtype=exact)
        scores, scale = _own_scores(query, own_key, plan, window), query.shape[-1] ** -0.5
        grad_, delta = grad.to(exact), (grad.to(exact) * out.to(exact)).sum(-1)
        for index, column in enumerate(plan.columns):
            rows, sources = column.rows, column.sources
            p = (scores[rows, :, index] - lse[rows]).exp()
            g, k, v = grad_[rows], _spread(own_key[sources], query).to(exact), _spread(own_value[sources], query)
            ds = p * ((g * v.to(exact)).sum(-1) - delta[rows]) * scale
            own_dv.index_add_(0, sources, _gather_heads(p[..., None] * g, own_value))
            own_dk.index_add_(0, sources, _gather_heads(ds[..., None] * query[rows].to(exact), own_key))
            dq.index_add_(0, rows, ds[..., None] * k)
        return (*(x.to(query.dtype) for x in (dq, dk, dv, own_dk, own_dv)), None, None)


def _exact_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _split_heads(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[Q, H, any] -> [Q, J, G, any]."""
    return x.view(x.shape[0], key.shape[1], x.shape[1] // key.shape[1], x.shape[2])


def _grouped(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[Q, H, E] -> [G, J, Q, E], a view: the heads that share a key head become the batch."""
    return _split_heads(query, key).permute(2, 1, 0, 3)


def _spread(own: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """[m, J, E] -> [m, H, E]: each key head for all its query heads."""
    return own.repeat_interleave(query.shape[1] // own.shape[1], 1)


def _gather_heads(grad: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[m, H, E] -> [m, J, E]: the sum over the query heads of each key head."""
    return _split_heads(grad, own).sum(2)


def _own_scores(query: torch.Tensor, own_key: torch.Tensor, plan: Plan, window: int | None) -> torch.Tensor:
    """[Q, H, columns], -inf where a query does not see the column."""
    exact = _exact_dtype(query.dtype)
    scores = query.new_full((*query.shape[:2], len(plan.columns)), -torch.inf, dtype=exact)
    for index, column in enumerate(plan.columns):
        keys = _spread(own_key[column.sources], query).to(exact)
        found = (query[column.rows].to(exact) * keys).sum(-1) * query.shape[-1] ** -0.5
        if window is not None:
            is_far = plan.depths_Q[column.rows] - column.depth >= window
            found = found.masked_fill(is_far[:, None], -torch.inf)
        scores[column.rows, :, index] = found
    return scores


def _runs(plan: Plan, window: int | None) -> Iterator[Run]:
    """The plan's runs. With a window a whole document is cut too: its mask would have the square of its tokens."""
    for run in plan.runs:
        if window is None or not run.is_causal:
            yield run
            continue
        first = run.rows.start - run.keys.start
        for lower in range(run.rows.start, run.rows.stop, LONGEST_RUN):
            upper = min(lower + LONGEST_RUN, run.rows.stop)
            begin = max(run.keys.start, lower - first - window + 1)
            yield Run(slice(lower, upper), slice(begin, upper - first), is_causal=False)


def _bias(plan: Plan, run: Run, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """[1, 1, queries, keys] of one run: 0 where visible, else -inf; None for a plain causal one."""
    if run.is_causal and window is None:
        return None
    keys = torch.arange(run.keys.start, run.keys.stop)
    anchors, depths = plan.anchors_Q[run.rows, None], plan.depths_Q[run.rows, None]
    is_hidden = keys > anchors
    if window is not None:
        is_hidden |= keys <= anchors + depths - window
    return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -torch.inf)[None, None]


def _core_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Q, H, E] over the core alone and its log-sum-exp [Q, H], -inf where none is seen."""
    exact = _exact_dtype(query.dtype)
    out, lse = torch.zeros(query.shape, dtype=exact), query.new_full(query.shape[:2], -torch.inf, dtype=exact)
    q, k, v = _grouped(query, key), key.transpose(0, 1), value.transpose(0, 1)
    group = q.shape[0]
    for run in _runs(plan, window):
        bias = _bias(plan, run, window, query.dtype)
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, run.rows],
            k[:, run.keys].expand(group, -1, -1, -1),
            v[:, run.keys].expand(group, -1, -1, -1),
            is_causal=bias is None,
            attn_mask=bias,
        )
        out[run.rows] = part.permute(2, 1, 0, 3).flatten(1, 2).to(exact)
        lse[run.rows] = part_lse.permute(2, 1, 0).flatten(1, 2).to(exact)
    # Flash gives a row that sees nothing the log-sum-exp 0.
    is_blind = plan.anchors_Q < plan.starts_Q
    if window is not None:
        is_blind |= plan.depths_Q >= window
    return out, lse.masked_fill_(is_blind[:, None], -torch.inf)


def _core_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: Plan,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value from the core, given the whole output and log-sum-exp."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype) for x in (query, key, value))
    q, g, o = (_grouped(x, key) for x in (query, grad, out))
    k, v, group = key.transpose(0, 1), value.transpose(0, 1), q.shape[0]
    lse_GJQ = _split_heads(lse[..., None], key)[..., 0].permute(2, 1, 0)
    for run in _runs(plan, window):
        bias = _bias(plan, run, window, query.dtype)
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g[:, :, run.rows],
            q[:, :, run.rows],
            k[:, run.keys].expand(group, -1, -1, -1),
            v[:, run.keys].expand(group, -1, -1, -1),
            o[:, :, run.rows],
            lse_GJQ[:, :, run.rows],
            0.0,
            bias is None,
            attn_mask=bias,
        )
        dq[run.rows] = parts[0].permute(2, 1, 0, 3).flatten(1, 2).to(lse.dtype)
        dk[run.keys] += parts[1].sum(0).transpose(0, 1)
        dv[run.keys] += parts[2].sum(0).transpose(0, 1)
    return dq, dk, dv

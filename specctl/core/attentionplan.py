"""Who sees whom in a training forward: the plan that attention follows on any device.

A *core* holds the keys of depth 0, one per slot. An element (anchor a, depth d) sees the core up to and
with a, within its document, and its *own* columns: the elements (a, 1) to (a, d).

Legend: N core keys, Q queries, M own keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specctl.core.device import is_gpu

SHORTEST_RUN, LONGEST_RUN = 64, 256
"""Queries per flash call with a mask: an eighth of the document, within these.

Few waste calls, and each backward call writes a gradient of all keys; many waste masked keys. Measured
at 512 and 4096 tokens. The upper bound keeps memory linear.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """The queries `rows` see own keys `sources`, both int64 [m], of depth `depth`."""

    depth: int
    rows: torch.Tensor
    sources: torch.Tensor


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive queries of one document and the core keys that any of them may see."""

    rows: slice
    keys: slice
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Who sees whom. `starts_Q` is the first core key of a query's document, `anchors_Q` its last."""

    anchors_Q: torch.Tensor
    depths_Q: torch.Tensor
    starts_Q: torch.Tensor
    own_anchors_M: torch.Tensor
    own_depths_M: torch.Tensor
    runs: tuple[Run, ...]
    columns: tuple[Column, ...]


def plan_attention(
    anchors_Q: torch.Tensor,
    depths_Q: torch.Tensor,
    *,
    starts_N: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Plan:
    """The plan of queries in rising order of anchor.

    `starts_N` int64 gives each core key the first key of its document. `own` are anchors and depths of
    the own keys; within a depth their anchors rise, and a query of depth d finds all of 1..d among them.
    """
    none = anchors_Q.new_zeros(0)
    own_anchors, own_depths = own if own is not None else (none, none)
    columns = tuple(
        _column(anchors_Q, depths_Q, own_anchors, own_depths, depth)
        for depth in range(1, 1 + (int(depths_Q.max()) if depths_Q.numel() else 0))
    )
    starts_Q = starts_N[anchors_Q]
    runs = () if is_gpu(anchors_Q.device) else tuple(_runs(anchors_Q, starts_Q))
    return Plan(anchors_Q, depths_Q, starts_Q, own_anchors, own_depths, runs, columns)


def _column(
    anchors_Q: torch.Tensor, depths_Q: torch.Tensor, own_anchors: torch.Tensor, own_depths: torch.Tensor, depth: int
) -> Column:
    rows = (depths_Q >= depth).nonzero()[:, 0]
    members = (own_depths == depth).nonzero()[:, 0]
    found = torch.searchsorted(own_anchors[members], anchors_Q[rows])
    sources = members[found.clamp_max(max(members.shape[0] - 1, 0))]
    assert torch.equal(own_anchors[sources], anchors_Q[rows]), f"a chain of depth {depth} has a hole"
    return Column(depth, rows, sources)


def _runs(anchors_Q: torch.Tensor, starts_Q: torch.Tensor) -> list[Run]:
    """Cut the queries at documents and into runs; whole plain documents stay in one causal call."""
    anchors, starts, runs = anchors_Q.tolist(), starts_Q.tolist(), []
    lower = 0
    while lower < len(anchors):
        start, upper = starts[lower], lower
        while upper < len(anchors) and starts[upper] == start:
            upper += 1
        if anchors[lower:upper] == list(range(start, start + upper - lower)):
            runs.append(Run(slice(lower, upper), slice(start, start + upper - lower), is_causal=True))
        else:
            size = min(max((anchors[upper - 1] + 1 - start) // 8, SHORTEST_RUN), LONGEST_RUN)
            for at in range(lower, upper, size):
                end = min(at + size, upper)
                if anchors[end - 1] >= start:
                    runs.append(Run(slice(at, end), slice(start, anchors[end - 1] + 1), is_causal=False))
        lower = upper
    return runs

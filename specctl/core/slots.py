"""The slot frame: which state meets which token, and what is scored. Said here once, for every draft.

Slot p of a document holds the embedding of x[p+1] and the target's states at p, and predicts x[p+2]; its
teacher is the target's own prediction of x[p+2], made from its `norm` state at p+1. `depth` d goes d
tokens further without new states: it is scored against x[p+2+d], with the teacher at p+1+d, at rotary
position p+d. An element is scored iff the token it is scored on lies in the same document and has its
loss mask set. In serving, p is the last verified token and x[p+1] the token just sampled from the target.

    x        0    1    2    3    4          mask over x   0 0 1 1 1
    slot 0: state 0, token 1 -> x[2]        depth 0 scored at slots 0 1 2
    slot 2: state 2, token 3 -> x[4]        depth 1 scored at slots 0 1 (x[3], x[4])

Legend: T packed tokens, N slots, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specctl.records.draft import DraftBatch


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a batch, in order; a document of n tokens has n - 1, one of a single token none.

    `tokens_N` int64, the packed index of p; `places_N` p within its document, the rotary position at
    depth 0; `ends_N` the packed index where its document ends; `starts_N` the slot with which its
    document begins.
    """

    tokens_N: torch.Tensor
    places_N: torch.Tensor
    ends_N: torch.Tensor
    starts_N: torch.Tensor


def slots_of(batch: DraftBatch) -> Slots:
    """The slots of every document; padding has none."""
    device = batch.input_ids.device
    bounds = torch.tensor(batch.offsets, dtype=torch.int64)
    counts = (bounds.diff() - 1).clamp_min(0)
    starts = counts.cumsum(0) - counts
    first, end, start = (x.repeat_interleave(counts) for x in (bounds[:-1], bounds[1:], starts))
    places = torch.arange(int(counts.sum())) - start
    return Slots(*(x.to(device) for x in (first + places, places, end, start)))


def scored(batch: DraftBatch, slots: Slots, num_depths: int) -> torch.Tensor:
    """bool [N, K]: whether slot p is scored at depth d, on x[p+2+d]."""
    mask = batch.loss_mask.bool()
    targets_NK = slots.tokens_N[:, None] + 2 + torch.arange(num_depths, device=slots.tokens_N.device)
    is_inside = targets_NK < slots.ends_N[:, None]
    return is_inside & mask[targets_NK.clamp_max(mask.shape[0] - 1)]

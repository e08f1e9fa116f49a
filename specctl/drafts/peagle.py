"""P-EAGLE: K tokens drafted in one forward, trained on sampled depths.

Depth 0 is EAGLE-3's step 0. Beyond it there is no token and no state: every element embeds the reserved
token and takes `mask_hidden` through the same projection, and differs by its rotary position, slot +
depth, alone. Depth 0 sees no element beyond it, so it runs once, and segments part only the rest.

Source: arXiv 2602.01469 section 3, Algorithm 1; depths are sampled by COD, arXiv 2504.18583.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.utils.checkpoint import checkpoint

from specctl.core.attention import KeysValues
from specctl.core.depths import Elements, at_depth, depth_zero, depths_beyond, join, score
from specctl.core.layer import Lead, lead_at
from specctl.core.losses import Teacher
from specctl.core.modules import DraftCache, DraftModel
from specctl.core.slots import Slots, scored, slots_of
from specctl.errors import UsageError
from specctl.records.draft import DraftBatch, DraftSettings, LossReport

IS_PARALLEL = True
COMPARED = 8
"""Slots of a document at which training and serving are compared."""


def training_loss(
    model: DraftModel,
    batch: DraftBatch,
    *,
    teacher: Teacher,
    settings: DraftSettings,
    generator: torch.Generator | None = None,
) -> LossReport:
    """The loss of depth 0 at every scored slot and of the depths that `generator` (on the CPU) samples.

    Depth d weighs depth_decay**d. Raises UsageError when the head is not made for parallel drafting.
    """
    if not model.head.parallel_drafting or model.head.mask_token_id is None:
        raise UsageError(
            "this head has no `mask_hidden` or no reserved token", hint="was it made for parallel drafting?"
        )
    slots = slots_of(batch)
    scored_NK = scored(batch, slots, settings.num_draft_tokens)
    chains = sample_chains(scored_NK, ratio=settings.cod_ratio, floor=settings.cod_floor, generator=generator)
    normed, elements = scored_states(model, batch, slots, (scored_NK[:, 0].nonzero()[:, 0], chains), settings=settings)
    return score(model, normed, elements, batch=batch, slots=slots, teacher=teacher, settings=settings)


def sample_chains(
    scored_NK: torch.Tensor, *, ratio: float, floor: float, generator: torch.Generator | None
) -> Elements:
    """The elements beyond depth 0 to train on, by slot and then depth; each is scored.

    Depth d keeps max(ratio**d, floor) of the slots scored at all of 1..d, drawn among those that hold
    depth d - 1, so that every chain is whole. A chain starts at a slot and is scored within its
    document: no anchor lies before the first slot, and none crosses documents.
    """
    wanted_NK = scored_NK.cpu()
    whole_NK = wanted_NK[:, 1:].cumprod(1)
    alive = torch.ones(wanted_NK.shape[0], dtype=torch.bool)
    parts = [at_depth(torch.zeros(0, dtype=torch.int64), 1)]
    for depth in range(1, wanted_NK.shape[1]):
        count = int(int(whole_NK[:, depth - 1].sum()) * max(ratio**depth, floor))
        pool = (alive & wanted_NK[:, depth]).nonzero()[:, 0]
        kept = pool[torch.randperm(len(pool), generator=generator)[:count]].sort().values
        if not kept.numel():
            break
        alive = torch.zeros_like(alive).index_fill_(0, kept, True)
        parts.append(at_depth(kept, depth))
    found = join(parts)
    order = (found.slots_M * wanted_NK.shape[1] + found.depths_M).argsort()
    return Elements(found.slots_M[order].to(scored_NK.device), found.depths_M[order].to(scored_NK.device))


def scored_states(
    model: DraftModel,
    batch: DraftBatch,
    slots: Slots,
    rows: tuple[torch.Tensor, Elements],
    *,
    settings: DraftSettings,
) -> tuple[torch.Tensor, Elements]:
    """Normed states [M, H] of depth 0 at the slots rows[0] and of the chains rows[1], and the elements."""
    first, chains = rows
    lead = model.lead(torch.cat((batch.input_ids, model.reserved_id())))
    stream, core = depth_zero(model, lead, batch.aux, slots, first, is_checkpointed=settings.checkpoint_layers)
    # One row stands for all: before the rotary turn they are the same.
    inputs = (lead_at(lead, slice(-1, None)), model.masked_projection())
    streams = [stream]
    for segment in segments(chains, settings.num_segments):
        arguments = (model, inputs, chains[segment], slots, core, settings.checkpoint_layers)
        if settings.num_segments > 1 and torch.is_grad_enabled():
            streams.append(checkpoint(_chain_streams, *arguments, use_reentrant=False))
        else:
            streams.append(_chain_streams(*arguments))
    return model.norm(torch.cat(streams)), join((at_depth(first, 0), chains))


def segments(chains: Elements, count: int) -> list[slice]:
    """At most `count` runs of whole chains, of about equal size.

    Each is computed on its own and computed again in backward, so that the memory of depths beyond 0 is
    that of one; no chain sees another, so the loss and every gradient are those of the whole.
    """
    size = len(chains)
    begins = torch.nn.functional.pad(chains.slots_M.diff() != 0, (1, 0), value=True).nonzero()[:, 0]
    wanted = torch.arange(1, count, device=begins.device) * size // count
    cuts = begins[torch.searchsorted(begins, wanted).clamp_max(max(len(begins) - 1, 0))] if size else begins
    bounds = sorted({0, size, *cuts.tolist()})
    return [slice(lower, upper) for lower, upper in pairwise(bounds)]


def _chain_streams(
    model: DraftModel,
    inputs: tuple[Lead, torch.Tensor],
    chains: Elements,
    slots: Slots,
    core: list[KeysValues],
    is_checkpointed: bool,
) -> torch.Tensor:
    return depths_beyond(model, inputs, chains, slots=slots, core=core, before=None, is_checkpointed=is_checkpointed)[0]


@torch.no_grad()
def flat_gap(model: DraftModel, batch: DraftBatch, num_draft_tokens: int) -> float:
    """How far this forward is from what a server runs: the difference of logits, relative to their norm.

    A server lays out each proposal flat: all real tokens and states up to a slot, then K - 1 times the
    reserved token and `mask_hidden`, plainly causal. Taken at some slots of the first document.
    Source: vllm `spec_decode/utils.py`, `copy_and_expand_eagle_inputs`.
    """
    slots, length = slots_of(batch), batch.offsets[1] - 1
    anchors = torch.unique(torch.linspace(0, length - 1, min(COMPARED, length), device=slots.tokens_N.device).long())
    every = num_draft_tokens - 1
    chains = Elements(anchors.repeat_interleave(every), torch.arange(1, every + 1).repeat(len(anchors)).to(anchors))
    settings = DraftSettings(num_draft_tokens, cod_ratio=1.0, cod_floor=1.0)
    normed, elements = scored_states(model, batch, slots, (anchors, chains), settings=settings)
    order = (elements.slots_M * num_draft_tokens + elements.depths_M).argsort()
    served = torch.cat([_served(model, batch, int(slots.tokens_N[a]), num_draft_tokens) for a in anchors.tolist()])
    return float((model.logits(normed)[order] - served).norm() / served.norm())


def _served(model: DraftModel, batch: DraftBatch, token: int, num_draft_tokens: int) -> torch.Tensor:
    """Logits [K, W] of the proposal after `token` of the first document, by the flat layout."""
    masked = num_draft_tokens - 1
    ids = torch.cat((batch.input_ids[1 : token + 2], *[model.reserved_id()] * masked))
    hidden = torch.cat((model.project(batch.aux[: token + 1]), *[model.masked_projection()] * masked))
    return model.logits(model.norm(DraftCache(model).run(ids, hidden)))[-num_draft_tokens:]

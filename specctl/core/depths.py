"""The passes that both drafts are made of: depth zero over every slot, depths beyond it, and the score.

An element is (slot, depth). Depth zero makes the core, the keys that all depths see; elements beyond it
see the core up to their slot and the elements of smaller depth at the same slot. EAGLE-3 adds a depth at
a time and P-EAGLE all at once. Legend: N slots, M elements, K depths, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specctl.core.attention import Attend, Bound, KeysValues, bind
from specctl.core.attentionplan import Plan, plan_attention
from specctl.core.layer import DraftLayer, Lead, lead_at
from specctl.core.losses import Scored, Teacher, distil
from specctl.core.modules import DraftModel
from specctl.core.slots import Slots
from specctl.records.draft import DraftBatch, DraftSettings, LossReport


@dataclass(frozen=True, slots=True)
class Elements:
    """Slots and depths, int64 [M], in rising order of slot (within a depth, where depths follow each other)."""

    slots_M: torch.Tensor
    depths_M: torch.Tensor

    def __len__(self) -> int:
        return self.slots_M.shape[0]

    def __getitem__(self, rows: slice | torch.Tensor) -> Elements:
        return Elements(self.slots_M[rows], self.depths_M[rows])


def at_depth(slots_M: torch.Tensor, depth: int) -> Elements:
    """These slots, all at one depth."""
    return Elements(slots_M, torch.full_like(slots_M, depth))


def join(parts: Sequence[Elements]) -> Elements:
    """All elements of `parts`, in their order."""
    return Elements(torch.cat([p.slots_M for p in parts]), torch.cat([p.depths_M for p in parts]))


@dataclass(frozen=True, slots=True)
class Own:
    """Elements beyond depth zero, and each layer's keys and values [M, J, E] of them."""

    elements: Elements
    layers: tuple[KeysValues, ...]


def depth_zero(
    model: DraftModel,
    lead_T: Lead,
    aux_T: torch.Tensor,
    slots: Slots,
    rows: torch.Tensor,
    *,
    is_checkpointed: bool,
) -> tuple[torch.Tensor, list[KeysValues]]:
    """The stream [rows, H] of real tokens and states, and each layer's keys and values of every slot.

    `lead_T` is that of all tokens, `aux_T` [T, A*D] the target's states.
    """
    every = torch.arange(slots.tokens_N.shape[0], device=slots.tokens_N.device)
    plans = [_plan(at_depth(every, 0), slots)] * (len(model.layers) - 1) + [_plan(at_depth(rows, 0), slots)]
    attends = [_core_attend(bound) for bound in _bind(model, plans)]
    return model.run_layers(
        lead_at(lead_T, slots.tokens_N + 1),
        model.project(aux_T[slots.tokens_N]),
        model.phases(slots.places_N),
        attends,
        rows=rows,
        is_checkpointed=is_checkpointed,
    )


def depths_beyond(
    model: DraftModel,
    inputs: tuple[Lead, torch.Tensor],
    elements: Elements,
    *,
    slots: Slots,
    core: Sequence[KeysValues],
    before: Own | None,
    is_checkpointed: bool,
) -> tuple[torch.Tensor, Own]:
    """The stream [M, H] of `elements`, and the keys and values of them and of all `before`.

    `inputs` are lead and hidden states, of M rows or of one for all alike.
    """
    seen = elements if before is None else join((before.elements, elements))
    plan = plan_attention(
        elements.slots_M, elements.depths_M, starts_N=slots.starts_N, own=(seen.slots_M, seen.depths_M)
    )
    old: Sequence[KeysValues | None] = [None] * len(core) if before is None else before.layers
    bound = _bind(model, [plan] * len(core))
    attends = [_own_attend(*layer) for layer in zip(bound, core, old, strict=True)]
    phases = model.phases(slots.places_N[elements.slots_M] + elements.depths_M)
    stream, new = model.run_layers(*inputs, phases, attends, is_checkpointed=is_checkpointed)
    return stream, Own(seen, tuple(_append(o, n) for o, n in zip(old, new, strict=True)))


def score(
    model: DraftModel,
    normed_MH: torch.Tensor,
    elements: Elements,
    *,
    batch: DraftBatch,
    slots: Slots,
    teacher: Teacher,
    settings: DraftSettings,
) -> LossReport:
    """The weighted loss of scored elements against the target, and what was hit at which depth."""
    teachers_M = slots.tokens_N[elements.slots_M] + 1 + elements.depths_M
    states, rows_M = torch.unique(teachers_M, return_inverse=True)
    weights_K = settings.depth_decay ** torch.arange(
        settings.num_draft_tokens, dtype=torch.float64, device=normed_MH.device
    )
    found = distil(
        normed_MH,
        model.lm_head.weight,
        teacher=teacher,
        states_UD=batch.final[states],
        rows_M=rows_M,
        weights_M=weights_K[elements.depths_M],
        kind=settings.loss,
        greedy_U=None if batch.greedy_ids is None else batch.greedy_ids[states],
    )
    return _report(found, elements, weights_K, num_slots=slots.tokens_N.shape[0])


def _report(found: Scored, elements: Elements, weights_K: torch.Tensor, *, num_slots: int) -> LossReport:
    was_scored = torch.zeros(num_slots, len(weights_K), dtype=torch.bool, device=weights_K.device)
    was_hit = was_scored.clone()
    was_scored[elements.slots_M, elements.depths_M] = True
    was_hit[elements.slots_M, elements.depths_M] = found.hits_M
    sums = torch.zeros(3, len(weights_K), dtype=torch.float64, device=weights_K.device)
    sums.index_add_(1, elements.depths_M, torch.stack((found.is_counted_M, found.losses_M, found.outside_M)).double())
    return LossReport(
        loss=found.total,
        weight=(weights_K * sums[0]).sum(),
        counts=sums[0].long(),
        losses=sums[1],
        hits=was_hit.sum(0),
        outside=sums[2].long(),
        prefix_counts=was_scored.cumprod(1).sum(0),
        prefix_hits=was_hit.cumprod(1).sum(0),
    )


def _plan(elements: Elements, slots: Slots) -> Plan:
    return plan_attention(elements.slots_M, elements.depths_M, starts_N=slots.starts_N)


def _bind(model: DraftModel, plans: Sequence[Plan]) -> list[Bound]:
    """One bound plan for each layer; layers with the same plan and window share it, and its mask."""
    bound: dict[tuple[int, int | None], Bound] = {}
    windows = [layer.window for layer in model.layers if isinstance(layer, DraftLayer)]
    return [bound.setdefault((id(p), w), bind(p, w)) for p, w in zip(plans, windows, strict=True)]


def _core_attend(bound: Bound) -> Attend:
    return lambda query, key, value: bound(query, (key, value), None)


def _own_attend(bound: Bound, core: KeysValues, old: KeysValues | None) -> Attend:
    return lambda query, key, value: bound(query, core, _append(old, (key, value)))


def _append(old: KeysValues | None, new: KeysValues) -> KeysValues:
    return new if old is None else (torch.cat((old[0], new[0])), torch.cat((old[1], new[1])))

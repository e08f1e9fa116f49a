"""EAGLE-3: an autoregressive draft, trained through the steps it will take (training-time test).

Step k takes the text's own tokens (teacher forced), the hidden states of step k - 1 and rotary positions
moved on by k; it sees the keys of step 0 up to its slot and its own column of steps 1..k, which is what
a server's cache holds when the k-th token is drafted.

Source: arXiv 2503.01840 section 3; vllm-project/speculators#818 for teacher forcing.
"""

from __future__ import annotations

import torch

from specctl.core.depths import Elements, at_depth, depth_zero, depths_beyond, join, score
from specctl.core.layer import lead_at
from specctl.core.losses import Teacher
from specctl.core.modules import DraftModel
from specctl.core.slots import Slots, scored, slots_of
from specctl.records.draft import DraftBatch, DraftSettings, LossReport

IS_PARALLEL = False


def training_loss(
    model: DraftModel,
    batch: DraftBatch,
    *,
    teacher: Teacher,
    settings: DraftSettings,
    generator: torch.Generator | None = None,
) -> LossReport:
    """The loss of `settings.num_draft_tokens` steps over every scored slot; step k weighs depth_decay**k.

    Draws nothing, so `generator` may be None. Depths of the report are steps.
    """
    slots = slots_of(batch)
    scored_NK = scored(batch, slots, settings.num_draft_tokens)
    normed, elements = scored_states(model, batch, slots, scored_NK, is_checkpointed=settings.checkpoint_layers)
    return score(model, normed, elements, batch=batch, slots=slots, teacher=teacher, settings=settings)


def scored_states(
    model: DraftModel, batch: DraftBatch, slots: Slots, scored_NK: torch.Tensor, *, is_checkpointed: bool
) -> tuple[torch.Tensor, Elements]:
    """Normed states [M, H] of every scored element, step after step, and the elements.

    A step is computed only at slots that it or a later one is scored on: nothing else sees its column.
    """
    needed_NK = scored_NK.flip(1).cumsum(1).flip(1) > 0
    here = needed_NK[:, 0].nonzero()[:, 0]
    lead_T = model.lead(batch.input_ids)
    stream, core = depth_zero(model, lead_T, batch.aux, slots, here, is_checkpointed=is_checkpointed)
    kept, elements, own, hidden = [], [], None, stream
    for step in range(scored_NK.shape[1]):
        if step:
            still = needed_NK[here, step].nonzero()[:, 0]
            here, hidden = here[still], hidden[still]
            lead = lead_at(lead_T, slots.tokens_N[here] + 1 + step)
            stream, own = depths_beyond(
                model,
                (lead, hidden),
                at_depth(here, step),
                slots=slots,
                core=core,
                before=own,
                is_checkpointed=is_checkpointed,
            )
        normed = model.norm(stream)
        hidden = model.next_hidden(stream, normed)
        is_scored = scored_NK[here, step]
        kept.append(normed[is_scored])
        elements.append(at_depth(here[is_scored], step))
    return torch.cat(kept), join(elements)

"""Decoding in this process: a whole target, a draft beside it, some prompts. For measuring from Python."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.core.draftload import draft_slots
from specctl.core.modules import DraftModel
from specctl.core.parallel import Wire
from specctl.core.placement import Placement
from specctl.core.products import quick_linears
from specctl.core.relay import Stage
from specctl.core.speculate import Batch, Decoded, DecodeSettings, Request
from specctl.core.target import LoadedTarget
from specctl.core.targetrows import TargetRows
from specctl.records.progress import SilentReporter


def decode_here(
    target: LoadedTarget,
    draft: DraftModel | None,
    requests: Sequence[Request],
    *,
    settings: DecodeSettings,
    batch: int = 1,
) -> list[Decoded]:
    """What becomes of `requests`, in their order, decoded `batch` at a time.

    Raises UsageError for a draft that does not say which states it takes.
    """
    slots = () if draft is None else draft_slots(draft.head, "the draft")
    with TargetRows(target, slots, Placement()) as rows, quick_linears(draft):
        stage = Stage(rows, Placement(), Wire(target.device), SilentReporter())

        def make(some: Sequence[Request]) -> Batch:
            can_cache, device = rows.can_cache, target.device
            return Batch(some, draft, rows.logits, settings=settings, can_cache=can_cache, device=device)

        return stage.decode(requests, batch, make)

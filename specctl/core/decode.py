"""Decoding some prompts: how target, draft and wire of a rank come together, in a run or from Python."""

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
from specctl.records.progress import Reporter, SilentReporter


def decode_rows(
    rows: TargetRows,
    draft: DraftModel | None,
    requests: Sequence[Request],
    *,
    settings: DecodeSettings,
    batch: int,
    wire: Wire,
    reporter: Reporter,
) -> list[Decoded]:
    """This rank's part in decoding `requests`, `batch` at a time; what becomes of them, in their order, on the last
    stage, which alone has the draft. `rows` must have been entered.
    """

    def make(some: Sequence[Request]) -> Batch:
        can_cache, device = rows.can_cache, rows.target.device
        return Batch(some, draft, rows.logits, settings=settings, can_cache=can_cache, device=device)

    with quick_linears(draft):
        return Stage(rows, rows.placement, wire, reporter).decode(requests, batch, make)


def decode_here(
    target: LoadedTarget,
    draft: DraftModel | None,
    requests: Sequence[Request],
    *,
    settings: DecodeSettings,
    batch: int = 1,
) -> list[Decoded]:
    """What becomes of `requests`, in their order, decoded `batch` at a time by a whole target in this process.

    Raises UsageError for a draft that does not say which states it takes.
    """
    slots = () if draft is None else draft_slots(draft.head, "the draft")
    with TargetRows(target, slots, Placement()) as rows:
        wire = Wire(target.device)
        return decode_rows(rows, draft, requests, settings=settings, batch=batch, wire=wire, reporter=SilentReporter())

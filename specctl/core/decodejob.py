"""Decoding on one rank: loads what this rank needs, decodes, and the last stage writes what came of it.

The job is picklable, so that it runs on any rank. The draft is loaded on the last stage alone.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.core.device import DTYPES, pick_device, synchronize
from specctl.core.draftload import build_draft, draft_slots, read_draft
from specctl.core.parallel import Wire
from specctl.core.placement import Placement, distributed_config
from specctl.core.relay import Stage
from specctl.core.speculate import Batch, Decoded, DecodeSettings, Request
from specctl.core.target import load_target
from specctl.core.targetrows import TargetRows
from specctl.core.teaching import read_parts
from specctl.records.progress import Reporter, SilentReporter
from specctl.records.target import TargetSpec


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """What became of all requests, in their order; seconds of decoding alone; bytes that all stages sent."""

    decoded: tuple[Decoded, ...]
    seconds: float
    bytes_sent: int
    plain: tuple[Decoded, ...] = ()
    plain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """Decode `requests` in batches of `batch`; with `is_timed_plain` also without the draft, before."""

    spec: TargetSpec
    draft: str | None
    requests: tuple[Request, ...]
    settings: DecodeSettings
    batch: int
    dtype: str
    device: str
    out: str
    is_timed_plain: bool = False
    trust_remote_code: bool = False

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        device = pick_device(self.device, placement.local_rank)
        target = load_target(
            self.spec,
            dtype=self.dtype,
            device=device,
            distributed_config=distributed_config(placement),
            trust_remote_code=self.trust_remote_code,
        )
        slots: tuple[str, ...] = ()
        draft = None
        if self.draft is not None:
            parts = read_parts(self.spec.path)
            head, tensors = read_draft(self.draft, parts)
            slots = draft_slots(head, self.draft)
            if placement.is_last_stage:
                draft = build_draft(head, tensors, parts, dtype=DTYPES[self.dtype], device=device)
        wire = Wire(device)
        with TargetRows(target, slots, placement) as rows:
            stage = Stage(rows, placement, wire, reporter)
            quiet = Stage(rows, placement, wire, SilentReporter())

            def run(stage: Stage, requests: Sequence[Request], settings: DecodeSettings) -> tuple[list[Decoded], float]:
                synchronize(device)
                began = time.monotonic()
                found = stage.decode(
                    requests,
                    self.batch,
                    lambda some: Batch(
                        some, draft, rows.logits, settings=settings, can_cache=rows.can_cache, device=device
                    ),
                )
                synchronize(device)
                return found, time.monotonic() - began

            short = replace(self.settings, max_new_tokens=2)
            run(quiet, self.requests[:1], short)  # first calls allocate and compile
            plain: tuple[list[Decoded], float | None] = ([], None)
            if self.is_timed_plain:
                reporter.start("plain", len(self.requests), "prompts")
                plain = run(stage, self.requests, replace(self.settings, num_draft_tokens=0))
                reporter.stop()
            before = wire.bytes_sent
            reporter.start("decode", len(self.requests), "prompts")
            decoded, seconds = run(stage, self.requests, self.settings)
            reporter.stop()
        wire.flush()
        sent = wire.total(wire.bytes_sent - before, placement.num_stages * placement.tp_size)
        if placement.is_last_stage and placement.tp_rank == 0:
            outcome = DecodeOutcome(tuple(decoded), seconds, sent, tuple(plain[0]), plain[1])
            Path(self.out).write_bytes(pickle.dumps(outcome))


def read_outcome(path: Path) -> DecodeOutcome:
    """What a job of this process wrote."""
    outcome = pickle.loads(path.read_bytes())  # our own file, written a moment ago
    assert isinstance(outcome, DecodeOutcome)
    return outcome

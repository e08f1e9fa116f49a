"""Decoding on one rank: loads what this rank needs, decodes, and the last stage writes what came of it.

The job is picklable, so that it runs on any rank. The draft is loaded on the last stage alone.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specctl.core.decode import decode_rows
from specctl.core.device import DTYPES, pick_device, synchronize
from specctl.core.draftload import build_draft, draft_slots, read_draft
from specctl.core.modules import DraftModel
from specctl.core.parallel import Wire
from specctl.core.placement import Placement, distributed_config
from specctl.core.speculate import Decoded, DecodeSettings, Request
from specctl.core.target import load_target
from specctl.core.targetrows import TargetRows
from specctl.core.teaching import read_parts
from specctl.errors import MachineError
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
        try:
            self._run(placement, device, reporter)
        except RuntimeError as error:
            # torch tells a full GPU by a class of its own, and a full host in words alone.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise MachineError(
                f"out of memory on {device} with `--batch {self.batch}`", hint="a smaller `--batch`, or more `--pp`"
            ) from error

    def _run(self, placement: Placement, device: torch.device, reporter: Reporter) -> None:
        target = load_target(
            self.spec,
            dtype=self.dtype,
            device=device,
            distributed_config=distributed_config(placement),
            trust_remote_code=self.trust_remote_code,
        )
        slots, draft = self._draft(placement, device)
        wire = Wire(device)
        with TargetRows(target, slots, placement) as rows:

            def run(
                talker: Reporter, requests: Sequence[Request], settings: DecodeSettings
            ) -> tuple[tuple[Decoded, ...], float]:
                synchronize(device)
                began = time.monotonic()
                found = decode_rows(
                    rows, draft, requests, settings=settings, batch=self.batch, wire=wire, reporter=talker
                )
                synchronize(device)
                return tuple(found), time.monotonic() - began

            # First calls allocate and compile.
            run(SilentReporter(), self.requests[: self.batch], replace(self.settings, max_new_tokens=2))
            plain: tuple[tuple[Decoded, ...], float | None] = ((), None)
            if self.is_timed_plain:
                reporter.start("plain", len(self.requests), "prompts")
                plain = run(reporter, self.requests, replace(self.settings, num_draft_tokens=0))
                reporter.stop()
            before = wire.bytes_sent
            reporter.start("decode", len(self.requests), "prompts")
            decoded, seconds = run(reporter, self.requests, self.settings)
            reporter.stop()
        wire.flush()
        sent = wire.total(wire.bytes_sent - before, placement.num_stages * placement.tp_size)
        if placement.is_last_stage and placement.tp_rank == 0:
            Path(self.out).write_bytes(pickle.dumps(DecodeOutcome(decoded, seconds, sent, *plain)))

    def _draft(self, placement: Placement, device: torch.device) -> tuple[tuple[str, ...], DraftModel | None]:
        """The target's states that the draft takes, on every stage; the draft itself on the last."""
        if self.draft is None:
            return (), None
        parts = read_parts(self.spec.path)
        head, tensors = read_draft(self.draft, parts)
        slots = draft_slots(head, self.draft)
        if not placement.is_last_stage:
            return slots, None
        return slots, build_draft(head, tensors, parts, dtype=DTYPES[self.dtype], device=device)


def read_outcome(path: Path) -> DecodeOutcome:
    """What a job of this process wrote."""
    outcome = pickle.loads(path.read_bytes())  # our own file, written a moment ago
    assert isinstance(outcome, DecodeOutcome)
    return outcome

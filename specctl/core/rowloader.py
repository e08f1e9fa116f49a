"""Rows as batches, a few ahead of training: read, checked, and with the target's own greedy tokens.

Greedy tokens cost a product with the whole head, so each sample's are found once and kept.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from specctl.core.corpus import Corpus, Place, Sample
from specctl.core.losses import Teacher
from specctl.core.packing import Row
from specctl.records.draft import DraftBatch

AHEAD = 4


@dataclass
class GreedyTokens:
    """The target's greedy token after each token of a sample, found once; int32 in memory."""

    teacher: Teacher
    kept: dict[Place, torch.Tensor] = field(default_factory=dict)

    def of(self, place: Place, sample: Sample) -> torch.Tensor:
        """int64 [T]; only where a scored token can follow, -1 elsewhere."""
        if place not in self.kept:
            found = torch.full((len(place),), -1, dtype=torch.int32)
            # The state at q is a teacher iff the token after it is supervised.
            scored = torch.zeros(len(place), dtype=torch.bool)
            scored[:-1] = sample.loss_mask[1:].bool()
            states = sample.final[scored].to(self.teacher.inside_WD.device)
            if states.shape[0]:
                found[scored] = self.teacher.greedy_ids(states).to(device="cpu", dtype=torch.int32)
            self.kept[place] = found
        return self.kept[place].long()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A row's batch, None where every sample of it was bad, and how many were."""

    row: Row
    batch: DraftBatch | None
    bad: int


def load_row(corpus: Corpus, row: Row, greedy: GreedyTokens | None) -> Loaded:
    """The batch of a row on the CPU; samples with states that are not finite are left out and counted."""
    samples, bad = [], 0
    for place in row.places:
        sample = corpus.sample(place)
        if not (torch.isfinite(sample.aux).all() and torch.isfinite(sample.final).all()):
            bad += 1
            continue
        samples.append((place, sample))
    if not samples:
        return Loaded(row, None, bad)
    bounds = [0]
    for place, _ in samples:
        bounds.append(bounds[-1] + len(place))
    batch = DraftBatch(
        input_ids=torch.cat([sample.input_ids for _, sample in samples]),
        offsets=tuple(bounds),
        loss_mask=torch.cat([sample.loss_mask for _, sample in samples]),
        aux=torch.cat([sample.aux for _, sample in samples]),
        final=torch.cat([sample.final for _, sample in samples]),
        greedy_ids=None if greedy is None else torch.cat([greedy.of(*pair) for pair in samples]),
    )
    return Loaded(row, batch, bad)


def loaded_ahead(corpus: Corpus, rows: Iterable[Row], greedy: GreedyTokens | None) -> Iterator[Loaded]:
    """`load_row` of each row, in order, up to AHEAD of them done by a thread before they are asked for.

    Closing the iterator ends the thread. Raises what reading raises.
    """
    done: queue.Queue[Loaded | BaseException | None] = queue.Queue(maxsize=AHEAD)
    is_closed = threading.Event()

    def work() -> None:
        try:
            for row in rows:
                _put(done, load_row(corpus, row, greedy), is_closed)
                if is_closed.is_set():
                    return
            _put(done, None, is_closed)
        except Exception as error:  # whatever it is: the trainer waits for this thread and would wait for ever
            _put(done, error, is_closed)

    thread = threading.Thread(target=work, name="specctl-rows", daemon=True)
    thread.start()
    try:
        while (item := done.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        is_closed.set()
        thread.join()


def _put(
    into: queue.Queue[Loaded | BaseException | None], item: Loaded | BaseException | None, is_closed: threading.Event
) -> None:
    while not is_closed.is_set():
        try:
            into.put(item, timeout=0.2)
            return
        except queue.Full:
            continue


def moved(batch: DraftBatch, device: torch.device) -> DraftBatch:
    """The batch on `device`."""
    if batch.input_ids.device == device:
        return batch
    tensors = (batch.input_ids, batch.loss_mask, batch.aux, batch.final)
    ids, mask, aux, final = (tensor.to(device, non_blocking=True) for tensor in tensors)
    greedy = None if batch.greedy_ids is None else batch.greedy_ids.to(device, non_blocking=True)
    return DraftBatch(ids, batch.offsets, mask, aux, final, greedy)

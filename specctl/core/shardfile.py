"""Takes one shard's states from the stages to a finished file. Knows stages and stores, not the target.

Runs on a thread beside the compute. Every stage writes the slots it owns into one file; a container
that only one process can write is made from such a file by the lead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl import plugins
from specctl.core import folder as folders
from specctl.core.parallel import StageGroup
from specctl.core.placement import Placement
from specctl.core.plan import PlannedShard
from specctl.core.samples import Spool
from specctl.errors import InputError, MachineError
from specctl.records.shard import SHARDS, DroppedSample, ShardEntry, ShardLayout, SlotArray

BITS: Mapping[str, tuple[Any, int, int]] = {
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float16": (np.uint16, 0x7FFF, 0x7C00),
}
FLOAT32_BITS: tuple[Any, int, int] = (np.uint32, 0x7FFFFFFF, 0x7F800000)
ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class ShardJob:
    """All that a finished shard needs to become a file."""

    shard: PlannedShard
    states: Mapping[str, SlotArray]
    """The slots this stage owns, [T, D] each."""


@dataclass(frozen=True, slots=True)
class ShardWriter:
    """Writes shards of one folder, the same on every stage of a replica."""

    folder: Path
    format: str
    compression: str
    dtype: str
    hidden_size: int
    slots: tuple[str, ...]
    allow_overflow: bool
    spool: Spool
    placement: Placement
    group: StageGroup

    def finish(self, job: ShardJob) -> ShardEntry | None:
        """Check, write, sync, rename and list one shard; None when no sample of it is left.

        Raises InputError on a float16 overflow, MachineError when the disk refuses.
        """
        dropped = self._refused(job)
        keep = [i for i, sample in enumerate(job.shard.samples) if sample not in dropped]
        samples = [job.shard.samples[i] for i in keep]
        states = job.states
        if len(keep) < len(job.shard.samples):
            rows = _rows(self.spool.lengths[list(job.shard.samples)], keep)
            states = {slot: array[rows] for slot, array in states.items()}
        store = plugins.load_store(self.format)
        path = self.folder / SHARDS / f"{job.shard.number:05d}{store.SUFFIX}"
        entry = self._write(path, samples, states, store) if samples else None
        if self.placement.is_lead:
            self._list(path, entry, dropped, job.shard)
        return entry

    def _write(self, path: Path, samples: list[int], states: Mapping[str, SlotArray], store: Any) -> ShardEntry:
        small = small_arrays(self.spool, samples)
        layout = ShardLayout(
            num_samples=len(samples),
            num_tokens=len(small["input_ids"]),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            slots=self.slots,
            compression=self.compression,
        )
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            if self.placement.num_stages == 1:
                store.write(temporary, layout, small, states)
            else:
                self._write_together(temporary, layout, small, states, store)
            entries = self.group.run(lambda: self._seal(temporary, path, layout, small))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise folders.cannot_write(self.folder, error, layout.slot_bytes() * len(layout.slots)) from error
        entry = entries[0]
        assert isinstance(entry, ShardEntry)
        return entry

    def _write_together(
        self,
        path: Path,
        layout: ShardLayout,
        small: Mapping[str, SlotArray],
        states: Mapping[str, SlotArray],
        store: Any,
    ) -> None:
        """Every stage writes its slots; the lead then repacks when the container needs one writer."""
        scratch = plugins.load("stores", "safetensors")
        raw = path if store.IS_RANDOM_ACCESS else path.with_name(f"{path.name}.raw")
        is_lead = self.placement.is_lead
        plain = layout if store.IS_RANDOM_ACCESS else replace(layout, compression="none")
        try:
            self.group.run(lambda: scratch.create(raw, plain, small) if is_lead else None)
            self.group.run(lambda: [scratch.write_slot(raw, slot, states[slot]) for slot in states] and None)
            if not store.IS_RANDOM_ACCESS:
                self.group.run(lambda: self._repack(raw, path, layout, small, store) if is_lead else None)
        finally:
            if raw != path and is_lead:
                raw.unlink(missing_ok=True)

    def _repack(self, raw: Path, path: Path, layout: ShardLayout, small: Mapping[str, SlotArray], store: Any) -> None:
        reader = plugins.load_store("safetensors").open_shard(raw)
        store.write(path, layout, small, {slot: reader.slot(slot) for slot in layout.slots})

    def _seal(
        self, temporary: Path, path: Path, layout: ShardLayout, small: Mapping[str, SlotArray]
    ) -> ShardEntry | None:
        if not self.placement.is_lead:
            return None
        checksum = folders.sha256(temporary)
        size = temporary.stat().st_size
        temporary.replace(path)
        folders.sync_folder(path.parent)
        return ShardEntry(
            file=path.name,
            rows=layout.num_samples,
            tokens=layout.num_tokens,
            supervised_tokens=int(small["loss_mask"].sum()),
            bytes=size,
            checksum=checksum,
        )

    def _list(self, path: Path, entry: ShardEntry | None, dropped: Mapping[int, str], shard: PlannedShard) -> None:
        keys = self.spool.keys
        drops = [
            DroppedSample(self.spool.sample_id(i), why, path.name, keys[i].tobytes().hex())
            for i, why in dropped.items()
        ]
        listed = entry or ShardEntry(path.name, 0, 0, 0, 0, "")
        is_shared = self.placement.num_replicas > 1
        try:
            folders.add_shard(self.folder, replace(listed, planned=shard.fingerprint), drops, is_shared=is_shared)
        except OSError as error:
            raise folders.cannot_write(self.folder, error) from error

    def _refused(self, job: ShardJob) -> dict[int, str]:
        """Samples with a state that is not finite, and where, agreed on by all stages."""
        lengths = self.spool.lengths[list(job.shard.samples)]
        mine = {slot: non_finite(array, lengths, self.dtype) for slot, array in job.states.items()}
        found: dict[str, NDArray[np.int64]] = {}
        for part in self.group.gather(mine):
            found |= part
        refused: dict[int, str] = {}
        for slot in self.slots:
            for i in np.flatnonzero(found[slot]).tolist():
                refused.setdefault(job.shard.samples[i], f"{found[slot][i]} non-finite values, first in slot {slot}")
        if refused and self.dtype == "float16" and not self.allow_overflow:
            index, why = next(iter(refused.items()))
            raise InputError(
                f"float16 cannot hold the states of sample `{self.spool.sample_id(index)}`: {why}",
                where=str(self.folder),
                hint="use `--dtype bfloat16`, or `--allow-overflow` to drop such samples and go on",
            )
        return refused


class Background:
    """Finishes one shard at a time on a thread, so that compute goes on; at most one is waiting."""

    def __init__(self, finish: Callable[[ShardJob], Any]) -> None:
        self._finish = finish
        self._thread: threading.Thread | None = None
        self._is_done = threading.Event()
        self._error: BaseException | None = None

    def submit(self, job: ShardJob) -> None:
        """Start finishing `job` once the one before is done. Raises what that one raised."""
        self.wait()
        self._is_done.clear()
        self._thread = threading.Thread(target=self._run, args=(job,), name="specctl-writer", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is under way. Raises what the writer raised."""
        if self._thread is not None and self._thread.ident is not None:  # Ctrl-C may come before it starts
            # A `join` that Ctrl-C interrupts takes the thread for ended (Python 3.11 and 3.12); an event does not.
            self._is_done.wait()
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, job: ShardJob) -> None:
        try:
            self._finish(job)
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._is_done.set()


def small_arrays(spool: Spool, samples: list[int]) -> dict[str, SlotArray]:
    """What a shard holds beside the states: offsets, input_ids, loss_mask, sample_ids."""
    lengths = spool.lengths[samples]
    names = [spool.sample_id(i).encode() for i in samples]
    width = max(map(len, names))
    ids = np.frombuffer(b"".join(n.ljust(width, b"\0") for n in names), np.uint8).reshape(len(names), width)
    return {
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "input_ids": np.concatenate([spool.input_ids(i) for i in samples]),
        "loss_mask": np.concatenate([spool.loss_mask(i) for i in samples]),
        "sample_ids": ids,
    }


def non_finite(states: SlotArray, lengths: NDArray[np.int64], dtype: str) -> NDArray[np.int64]:
    """int64 [S]: NaN and infinite values per sample, counted on the bits."""
    kind, magnitude, infinity = BITS.get(dtype, FLOAT32_BITS)
    bits = states.view(kind)
    # The largest exponent alone decides: one cheap pass finds nothing in all but broken shards.
    per_row = np.zeros(len(bits), np.int64)
    for start in range(0, len(bits), ROWS_AT_ONCE):
        block = (bits[start : start + ROWS_AT_ONCE] & kind(magnitude)) >= kind(infinity)
        if block.any():
            per_row[start : start + ROWS_AT_ONCE] = block.sum(axis=1)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.add.reduceat(per_row, starts).astype(np.int64)


def _rows(lengths: NDArray[np.int64], keep: list[int]) -> NDArray[np.int64]:
    ends = np.cumsum(lengths)
    return np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in keep] or [np.zeros(0, np.int64)])


def require_space(folder: Path, needed: int, free: int) -> None:
    """Raises MachineError when the states to come cannot fit."""
    if needed > free:
        raise MachineError(
            f"the disk is too small: {needed:,} bytes are needed and {free:,} bytes are free",
            where=str(folder),
            hint="fewer `--layers`, `--limit`, Parquet with zstd, or another disk",
        )

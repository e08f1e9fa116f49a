"""Tokenised samples on disk between reading DATA and running the target. Knows no model.

Memory holds a few numbers per sample and never the tokens, so that DATA may be of any length, and
every rank maps the same files. The spool lives as long as the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specctl.records.progress import Reporter
from specctl.records.sample import Dropped, Sample

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Spool:
    """Samples by index. `keys` uint8 [S, 16]; `lengths`, `supervised` int64 [S]; `starts` int64 [S]."""

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    supervised: NDArray[np.int64]
    id_lengths: NDArray[np.int64]
    keys: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.lengths)

    def input_ids(self, index: int) -> NDArray[np.int32]:
        """int32 [T] of one sample."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        return self.data[start : start + 4 * length].view(np.int32)

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        """uint8 [T] of one sample."""
        start = int(self.starts[index] + 4 * self.lengths[index])
        return self.data[start : start + int(self.lengths[index])]

    def sample_id(self, index: int) -> str:
        """The id of one sample."""
        start = int(self.starts[index] + 5 * self.lengths[index])
        return bytes(self.data[start : start + int(self.id_lengths[index])]).decode()


@dataclass(frozen=True, slots=True)
class SpoolReport:
    """What became of the rows of DATA; `drops` counts refused rows by reason, `first_drops` shows some."""

    rows: int
    samples: int
    tokens: int
    supervised_tokens: int
    truncated: int
    drops: dict[str, int]
    first_drops: tuple[str, ...]


def fill_spool(folder: Path, samples: Iterable[Sample | Dropped], reporter: Reporter) -> SpoolReport:
    """Write `samples` into `folder` and say what became of each row. Raises OSError.

    A row equal to an earlier one in id, tokens and mask is dropped as `duplicate`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drops: Counter[str] = Counter()
    shown: list[str] = []
    columns: list[tuple[int, int, int, int]] = []
    keys = bytearray()
    seen: set[bytes] = set()
    rows = truncated = position = 0
    reporter.start("reading", None, "rows")
    with (folder / "data").open("wb") as file:
        for sample in samples:
            rows += 1
            reporter.advance(1)
            if not isinstance(sample, Dropped) and sample.sample_id.endswith("\0"):
                # Shards pad ids with NUL: read back, the id would be another one.
                sample = replace(sample, sample_id=sample.sample_id.rstrip("\0"))
            key = b"" if isinstance(sample, Dropped) else sample.key()
            if isinstance(sample, Dropped) or key in seen:
                dropped = sample if isinstance(sample, Dropped) else Dropped(sample.where, "duplicate")
                drops[dropped.reason] += 1
                if len(shown) < 5:
                    shown.append(f"{dropped.where}: {dropped.reason}" + f" ({dropped.detail})" * bool(dropped.detail))
                continue
            seen.add(key)
            keys += key
            name = sample.sample_id.encode()
            # Padded to 4 bytes, so that the next sample's ids are aligned.
            body = sample.input_ids.tobytes() + sample.loss_mask.tobytes() + name
            file.write(body + b"\0" * (-len(body) % 4))
            columns.append((position, len(sample.input_ids), int(sample.loss_mask.sum()), len(name)))
            position += len(body) + -len(body) % 4
            truncated += sample.is_truncated
    reporter.stop()
    table = np.array(columns, np.int64).reshape(-1, 4)
    with (folder / "index.npz").open("wb") as file:
        np.savez(file, table=table, keys=np.frombuffer(bytes(keys), np.uint8).reshape(-1, KEY_BYTES))
    return SpoolReport(
        rows=rows,
        samples=len(table),
        tokens=int(table[:, 1].sum()),
        supervised_tokens=int(table[:, 2].sum()),
        truncated=truncated,
        drops=dict(sorted(drops.items())),
        first_drops=tuple(shown),
    )


def open_spool(folder: Path) -> Spool:
    """Map the spool that `fill_spool` wrote."""
    with np.load(folder / "index.npz") as index:
        table, keys = index["table"], index["keys"]
    path = folder / "data"
    data = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    starts, lengths, supervised, id_lengths = (np.ascontiguousarray(column) for column in table.T)
    return Spool(data, starts, lengths, supervised, id_lengths, keys)

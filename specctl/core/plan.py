"""Which samples share a shard and which a batch. Pure arithmetic on lengths and keys.

The plan depends on the samples and the settings alone, never on ranks or on what was done before, so
that any number of processes, and a run that was killed, make the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specctl.core.lengths import LengthRule
from specctl.core.samples import Spool


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that run together, longest first: rows [begin, end) of the shard, padded to `width`."""

    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    begin: int

    @property
    def width(self) -> int:
        """Tokens of the longest sample."""
        return self.lengths[0]

    @property
    def end(self) -> int:
        """The shard row after the batch's last."""
        return self.begin + sum(self.lengths)


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One shard to make: its number, its samples in row order, and the batches that fill it.

    `fingerprint` identifies the set of samples.
    """

    number: int
    samples: tuple[int, ...]
    num_tokens: int
    fingerprint: str


def order(spool: Spool, seed: int) -> NDArray[np.int64]:
    """Sample indices in an order drawn from `seed` and each sample's key, not from its position.

    The same rows in another order, or in other files, come out the same.
    """
    keys = np.ascontiguousarray(spool.keys).view(np.uint64)
    if not len(keys):
        return np.zeros(0, np.int64)
    mixed = _mix(keys[:, 0] ^ _mix(np.full(len(keys), seed % 2**64, np.uint64)))
    return np.lexsort((keys[:, 1], keys[:, 0], mixed)).astype(np.int64)


def plan_shards(
    spool: Spool, indices: NDArray[np.int64], *, shard_tokens: int, first_number: int = 0
) -> list[PlannedShard]:
    """Fill shards with samples in order, each up to `shard_tokens`, one sample at least."""
    shards: list[PlannedShard] = []
    members: list[int] = []
    tokens = 0
    for index in indices.tolist():
        length = int(spool.lengths[index])
        if members and tokens + length > shard_tokens:
            shards.append(_shard(spool, members, first_number + len(shards)))
            members, tokens = [], 0
        members.append(index)
        tokens += length
    if members:
        shards.append(_shard(spool, members, first_number + len(shards)))
    return shards


def plan_batches(
    spool: Spool, shard: PlannedShard, *, batch_tokens: int, rule: LengthRule | None = None
) -> list[Batch]:
    """The batches that fill a shard, in row order."""
    lengths = [int(spool.lengths[i]) for i in shard.samples]
    batches: list[Batch] = []
    begin = 0
    for first, end in cut_batches(lengths, batch_tokens=batch_tokens, rule=rule):
        batches.append(Batch(shard.samples[first:end], tuple(lengths[first:end]), begin))
        begin = batches[-1].end
    return batches


def cut_batches(lengths: Sequence[int], *, batch_tokens: int, rule: LengthRule | None = None) -> list[tuple[int, int]]:
    """Cut samples, longest first, into ranges [first, end) of at most `batch_tokens` padded tokens.

    A sample longer than that runs alone. A batch ends where padding would pass an eighth of a row:
    more padding costs more than a smaller batch does; and where `rule` keeps rows apart.
    """
    ranges: list[tuple[int, int]] = []
    first = 0
    for i, length in enumerate(lengths):
        width = lengths[first]
        is_apart = rule is not None and rule.parts(width, length)
        if i > first and ((i - first + 1) * width > batch_tokens or length < width * 7 // 8 or is_apart):
            ranges.append((first, i))
            first = i
    return [*ranges, (first, len(lengths))]


def _shard(spool: Spool, members: Sequence[int], number: int) -> PlannedShard:
    def longest_first(index: int) -> tuple[int, bytes]:
        return -int(spool.lengths[index]), spool.keys[index].tobytes()

    samples = tuple(sorted(members, key=longest_first))
    digest = hashlib.sha256(b"".join(spool.keys[i].tobytes() for i in samples))
    tokens = int(spool.lengths[list(samples)].sum())
    return PlannedShard(number, samples, tokens, digest.hexdigest()[:32])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: every input bit moves every output bit."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)), np.uint64)

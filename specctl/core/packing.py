"""Which samples meet in which row, epoch by epoch: from seed and settings alone, so that any run can go on.

A row holds whole samples one after the other; documents in it never see each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specctl.core.corpus import Place


@dataclass(frozen=True, slots=True)
class Row:
    """Samples packed into one row. `number` counts rows of the whole run; randomness is drawn by it."""

    number: int
    epoch: int
    places: tuple[Place, ...]

    def __len__(self) -> int:
        return sum(map(len, self.places))


def epoch_order(places: Sequence[Place], *, epoch: int, seed: int, weights: Sequence[float]) -> list[Place]:
    """The samples of one epoch in training order; each folder's taken `weights[folder]` times.

    A part of a time takes that share of the folder, another one each epoch.
    """
    rng = random.Random(f"{seed}-{epoch}")
    chosen: list[Place] = []
    for folder, weight in enumerate(weights):
        mine = [place for place in places if place.folder == folder]
        rng.shuffle(mine)
        whole = int(weight)
        chosen += mine * whole + mine[: round(len(mine) * (weight - whole))]
    rng.shuffle(chosen)
    return chosen


def pack(order: Sequence[Place], batch_tokens: int, *, epoch: int, first: int = 0) -> Iterator[Row]:
    """Rows of at most `batch_tokens`, in order; a longer sample is a row of its own."""
    held: list[Place] = []
    size, number = 0, first
    for place in order:
        if held and size + len(place) > batch_tokens:
            yield Row(number, epoch, tuple(held))
            held, size, number = [], 0, number + 1
        held.append(place)
        size += len(place)
    if held:
        yield Row(number, epoch, tuple(held))


def rows_per_epoch(places: Sequence[Place], batch_tokens: int, *, seed: int, weights: Sequence[float]) -> int:
    """The rows of the first epoch; later ones differ by a few."""
    return sum(1 for _ in pack(epoch_order(places, epoch=0, seed=seed, weights=weights), batch_tokens, epoch=0))


def training_rows(
    places: Sequence[Place], batch_tokens: int, *, seed: int, weights: Sequence[float], skip: int = 0
) -> Iterator[Row]:
    """Rows without end, epoch after epoch, the first `skip` left out."""
    epoch, number = 0, 0
    while True:
        order = epoch_order(places, epoch=epoch, seed=seed, weights=weights)
        for row in pack(order, batch_tokens, epoch=epoch, first=number):
            number = row.number + 1
            if row.number >= skip:
                yield row
        epoch += 1

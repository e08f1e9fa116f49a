"""Keys and values of rows that advance at their own pace: position p of a row lies at index p, always.

What a row wrote beyond its length is never seen and is overwritten, so forgetting refused tokens costs
nothing. Legend: B rows, Q new positions a row, J key heads, E head dim, L length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

FIRST_LENGTH = 256


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a forward writes: row b's new positions are starts_B[b] to starts_B[b] + Q - 1.

    `end` is the length over all rows after it; `is_even` says that all rows start at the same position.
    """

    positions_BQ: torch.Tensor
    end: int
    is_even: bool

    @staticmethod
    def of(starts: list[int], count: int, device: torch.device) -> Frame:
        """The frame of rows that start at `starts` and write `count` positions each."""
        begin = torch.tensor(starts, device=device)
        positions = begin[:, None] + torch.arange(count, device=device)
        return Frame(positions, max(starts) + count, min(starts) == max(starts))

    def bias(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, Q, L]: 0 where a position is seen, else the least number. With a window only its last ones are."""
        keys = torch.arange(self.end, device=self.positions_BQ.device)
        hidden = keys > self.positions_BQ[..., None]
        if window is not None:
            hidden |= keys <= self.positions_BQ[..., None] - window
        return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(hidden, torch.finfo(dtype).min)[
            :, None
        ]


class RowsStore:
    """One layer's keys and values, [B, J, L, E] each."""

    def __init__(self) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, frame: Frame, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put [B, J, Q, E] at the frame's positions; all keys and values up to its end, as views."""
        self._reserve(frame.end, key, value)
        assert self._pair is not None
        for store, new in zip(self._pair, (key, value), strict=True):
            if frame.is_even:
                store[:, :, frame.end - new.shape[2] : frame.end] = new
            else:
                rows = torch.arange(new.shape[0], device=new.device)[:, None]
                store[rows, :, frame.positions_BQ] = new.transpose(1, 2)
        return self._pair[0][:, :, : frame.end], self._pair[1][:, :, : frame.end]

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these."""
        if self._pair is not None:
            self._pair = (self._pair[0][rows], self._pair[1][rows])

    def _reserve(self, length: int, key: torch.Tensor, value: torch.Tensor) -> None:
        held = 0 if self._pair is None else self._pair[0].shape[2]
        if length <= held:
            return
        size = max(length, 2 * held, FIRST_LENGTH)
        grown = tuple(x.new_zeros(x.shape[0], x.shape[1], size, x.shape[3]) for x in (key, value))
        if self._pair is not None:
            for new, old in zip(grown, self._pair, strict=True):
                new[:, :, :held] = old
        self._pair = (grown[0], grown[1])


class RowsCache(Cache):  # type: ignore[misc]
    """transformers' cache of a target over `RowsStore`; `frame` is set before each forward."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])
        self.frame: Frame | None = None

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these."""
        for layer in self.layers:
            layer.store.keep(rows)


class _Layer(DynamicLayer):  # type: ignore[misc]
    def __init__(self, cache: RowsCache) -> None:
        super().__init__()
        self._cache, self.store = cache, RowsStore()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        frame = self._cache.frame
        assert frame is not None
        return self.store.write(frame, key_states, value_states)

    def get_seq_length(self) -> int:
        frame = self._cache.frame
        return 0 if frame is None else frame.end - frame.positions_BQ.shape[1]

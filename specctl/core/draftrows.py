"""A draft that proposes for many rows at once, each at its own position, fed what a server feeds it.

Slot p holds token p + 1 and the target's states at p (docs/design.md, Slot frame). Legend: B rows, Q new
slots a row, K draft tokens, H the draft's hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from specctl.core.attention import Attend
from specctl.core.modules import DraftModel
from specctl.core.ragged import Frame, RowsStore

Choose = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Logits [B, W] of one depth to draft ids [B], and what they were drawn from, [B, W] (None: the likeliest taken)."""


@dataclass(frozen=True, slots=True)
class Proposed:
    """K draft tokens for each row, as the target's ids [B, K]; `odds_BKW` where they were drawn."""

    ids_BK: torch.Tensor
    odds_BKW: torch.Tensor | None


class DraftRows:
    """The draft with the keys and values of its rows."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._stores = [RowsStore() for _ in draft.layers]

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but these."""
        for store in self._stores:
            store.keep(rows)

    @torch.inference_mode()
    def propose(
        self,
        ids_BQ: torch.Tensor,
        states_BQA: torch.Tensor,
        starts: list[int],
        *,
        counts: Sequence[int],
        num_tokens: int,
        choose: Choose,
    ) -> Proposed:
        """K tokens that follow each row.

        Row b's first counts[b] columns are new slots from position starts[b] on: `ids_BQ` the token after
        each, `states_BQA` the target's states at it. What lies beyond counts[b] is padding.
        """
        hidden_BQH = self._draft.project(states_BQA)
        run = self._in_parallel if self._draft.head.parallel_drafting else self._one_by_one
        chosen = run(ids_BQ, hidden_BQH, starts, counts, num_tokens, choose)
        odds = [odds for _, odds in chosen if odds is not None]
        ids = torch.stack([self._draft.target_ids(ids) for ids, _ in chosen], dim=1)
        return Proposed(ids, torch.stack(odds, dim=1) if odds else None)

    def _one_by_one(
        self,
        ids_BQ: torch.Tensor,
        hidden_BQH: torch.Tensor,
        starts: list[int],
        counts: Sequence[int],
        num_tokens: int,
        choose: Choose,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        draft, device = self._draft, ids_BQ.device
        rows, last = torch.arange(len(starts), device=device), torch.tensor(counts, device=device) - 1
        stream = self._run(ids_BQ, hidden_BQH, Frame.of(starts, ids_BQ.shape[1], device))[rows, last]
        ends, chosen = [start + count for start, count in zip(starts, counts, strict=True)], []
        for depth in range(num_tokens):
            normed = draft.norm(stream)
            chosen.append(choose(draft.logits(normed)))
            if depth + 1 < num_tokens:
                ids = draft.target_ids(chosen[-1][0])[:, None]
                hidden = draft.next_hidden(stream, normed)[:, None]
                stream = self._run(ids, hidden, Frame.of([end + depth for end in ends], 1, device))[:, 0]
        return chosen

    def _in_parallel(
        self,
        ids_BQ: torch.Tensor,
        hidden_BQH: torch.Tensor,
        starts: list[int],
        counts: Sequence[int],
        num_tokens: int,
        choose: Choose,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        draft, device, masked = self._draft, ids_BQ.device, num_tokens - 1
        width = ids_BQ.shape[1] + masked
        columns, count_B1 = torch.arange(width, device=device), torch.tensor(counts, device=device)[:, None]
        is_real = (columns < count_B1)[:, : ids_BQ.shape[1]]
        ids = draft.reserved_id().expand(len(starts), width).clone()
        ids[:, : ids_BQ.shape[1]] = torch.where(is_real, ids_BQ, ids[:, : ids_BQ.shape[1]])
        hidden = draft.masked_projection()[None].expand(len(starts), width, -1).clone()
        hidden[:, : ids_BQ.shape[1]] = torch.where(is_real[..., None], hidden_BQH, hidden[:, : ids_BQ.shape[1]])
        stream = self._run(ids, hidden, Frame.of(starts, width, device))
        at = count_B1 - 1 + torch.arange(num_tokens, device=device)
        wanted = stream[torch.arange(len(starts), device=device)[:, None], at]
        logits = draft.logits(draft.norm(wanted))
        return [choose(logits[:, depth]) for depth in range(num_tokens)]

    def _run(self, ids_BQ: torch.Tensor, hidden_BQH: torch.Tensor, frame: Frame) -> torch.Tensor:
        """The stream [B, Q, H] of the frame's slots, whose keys and values are kept."""
        draft, shape = self._draft, hidden_BQH.shape
        stream, _ = draft.run_layers(
            draft.lead(ids_BQ.flatten()),
            hidden_BQH.flatten(0, 1),
            draft.phases(frame.positions_BQ.flatten()),
            [self._attend(index, frame, shape[:2]) for index in range(len(self._stores))],
        )
        return stream.view(shape)

    def _attend(self, index: int, frame: Frame, shape: torch.Size) -> Attend:
        window = self._draft.layers[index].window

        def by_row(x: torch.Tensor) -> torch.Tensor:
            return x.view(*shape, *x.shape[1:]).transpose(1, 2)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = self._stores[index].write(frame, by_row(key), by_row(value))
            bias = frame.bias(window, query.dtype)  # type: ignore[arg-type]
            is_grouped = query.shape[1] != key.shape[1]
            out = scaled_dot_product_attention(by_row(query), keys, values, attn_mask=bias, enable_gqa=is_grouped)
            return out.transpose(1, 2).flatten(0, 1)

        return attend

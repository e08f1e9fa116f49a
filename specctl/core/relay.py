"""Decoding over pipeline stages: the stream goes forward once a hop, token ids come back, and nothing else.

The last stage holds head and draft and orders what every stage reads next. As many batches are under way
as there are stages, so that none waits for a whole round. Legend: B rows, Q columns, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from specctl.core.parallel import Wire
from specctl.core.placement import Placement
from specctl.core.pulse import PULSE
from specctl.core.ragged import Frame, RowsCache
from specctl.core.speculate import Batch, Decoded, Order, Request
from specctl.core.targetrows import TargetRows
from specctl.records.layers import NORM
from specctl.records.progress import Reporter

HEADER, BODY, STREAM = 0, 1, 2
KINDS_OF_MESSAGES = 3


class Stage:
    """One rank's part in decoding: its target, the caches of the batches under way, its wire."""

    def __init__(self, rows: TargetRows, placement: Placement, wire: Wire, reporter: Reporter) -> None:
        self._rows, self._placement, self._wire, self._reporter = rows, placement, wire, reporter
        self._caches: dict[int, RowsCache | None] = {}
        self._sizes: dict[int, int] = {}

    def decode(
        self, requests: Sequence[Request], batch_size: int, make: Callable[[Sequence[Request]], Batch]
    ) -> list[Decoded]:
        """Everything that becomes of `requests`, in their order, on the last stage; an empty list on others."""
        waiting = [requests[at : at + batch_size] for at in range(0, len(requests), batch_size)]
        groups = min(self._placement.num_stages, len(waiting))
        if self._placement.is_last_stage:
            done = self._decode_last(iter(waiting), groups, make)
            by_key = {decoded.key: decoded for decoded in done}
            return [by_key[request.key] for request in requests]
        active = list(range(groups))
        while active:
            for group in list(active):
                order = self._receive_order(group)
                if order is None:
                    self._count(group, 0)
                    active.remove(group)
                else:
                    self._read(group, order)
        return []

    def _decode_last(
        self, waiting: Iterator[Sequence[Request]], groups: int, make: Callable[[Sequence[Request]], Batch]
    ) -> list[Decoded]:
        done: list[Decoded] = []
        batches = {group: make(next(waiting)) for group in range(groups)}
        orders: dict[int, Order] = {}
        for group, batch in batches.items():
            orders[group] = batch.order()
            self._send_order(group, orders[group])
        while orders:
            for group in list(orders):
                states = self._read(group, orders[group])
                with PULSE.step(orders[group].ids_BQ.numel()):
                    order = batches[group].advance(self._rows.fused(states), states[NORM])
                if order is None:
                    done += batches[group].finished
                    following = next(waiting, None)
                    if following is not None:
                        batches[group] = make(following)
                        order = batches[group].order()
                self._send_order(group, order)
                if order is None:
                    self._count(group, 0)
                    del orders[group]
                else:
                    orders[group] = order
        return done

    def _read(self, group: int, order: Order) -> dict[str, torch.Tensor]:
        """This stage's part of an order; its message to the next stage is on its way."""
        placement, shape = self._placement, order.ids_BQ.shape
        if order.is_first:
            self._count(group, 0)
            self._caches[group] = self._rows.new_cache()
        cache = self._caches[group]
        if not order.is_first and cache is not None and len(order.keep) < self._sizes[group]:
            cache.keep(torch.tensor(order.keep, device=order.ids_BQ.device))
        self._count(group, shape[0])
        received = None
        if not placement.is_first_stage:
            wanted = (*shape, self._rows.width_in)
            tag = group * KINDS_OF_MESSAGES + STREAM
            received = self._wire.receive(wanted, self._rows.target.dtype, placement.stage - 1, tag=tag)
        frame = Frame.of(order.starts, shape[1], order.ids_BQ.device)
        with PULSE.step(order.ids_BQ.numel()):
            states = self._rows.run(order.ids_BQ, frame, cache, received)
        if not placement.is_last_stage:
            message = self._rows.pack(states).to(self._rows.target.dtype)
            self._wire.send(message, placement.stage + 1, tag=group * KINDS_OF_MESSAGES + STREAM)
        return states

    def _count(self, group: int, size: int) -> None:
        """Note how many rows a batch has now; those it lost, or all of an earlier batch, are finished."""
        self._reporter.advance(self._sizes.get(group, 0) - size if size <= self._sizes.get(group, 0) else 0)
        self._sizes[group] = size

    def _send_order(self, group: int, order: Order | None) -> None:
        if self._placement.num_stages == 1:
            return
        header = torch.zeros(4, dtype=torch.int64)
        body = torch.zeros(0, dtype=torch.int64)
        if order is not None:
            header = torch.tensor([*order.ids_BQ.shape, len(order.keep), int(order.is_first)])
            numbers = torch.tensor([*order.starts, *order.keep], dtype=torch.int64)
            body = torch.cat((order.ids_BQ.flatten().cpu(), numbers))
        for stage in range(self._placement.num_stages - 1):
            self._wire.send(header, stage, tag=group * KINDS_OF_MESSAGES + HEADER)
            if len(body):
                self._wire.send(body, stage, tag=group * KINDS_OF_MESSAGES + BODY)

    def _receive_order(self, group: int) -> Order | None:
        last, tag = self._placement.num_stages - 1, group * KINDS_OF_MESSAGES
        header = self._wire.receive((4,), torch.int64, last, tag=tag + HEADER).tolist()
        rows, columns, kept, is_first = header
        if not rows:
            return None
        body = self._wire.receive((rows * columns + rows + kept,), torch.int64, last, tag=tag + BODY)
        ids, rest = body[: rows * columns].view(rows, columns), body[rows * columns :].tolist()
        device = self._rows.target.device
        return Order(ids.to(device), rest[:rows], rest[rows:], bool(is_first))

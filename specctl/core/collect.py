"""States that another engine returns by request, put back in order or refused. Knows no engine.

Servers answer out of order, in chunks, and skip what a prefix cache holds. A sample is taken only when
its pieces, joined, carry exactly the tokens that were asked, in every slot. The seam for engines that
extract elsewhere; specctl's own stages run a plan in order and need none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specctl.errors import InputError
from specctl.records.sample import Dropped
from specctl.records.shard import SlotArray


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer: `token_ids` int32 [t] and per slot the states [t, D] at them."""

    request_id: str
    token_ids: NDArray[np.int32]
    states: Mapping[str, SlotArray]


@dataclass(frozen=True, slots=True)
class Collected:
    """A whole answer: per slot the states [T, D] of the request's T tokens."""

    request_id: str
    states: Mapping[str, SlotArray]


@dataclass(slots=True)
class _Open:
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    states: dict[str, list[SlotArray]] = field(default_factory=dict)
    count: int = 0


def collect(
    pieces: Iterable[Piece], asked: Mapping[str, NDArray[np.int32]], slots: Sequence[str]
) -> Iterator[Collected | Dropped]:
    """Every request of `asked` once, as it completes; a refused one as Dropped with its reason.

    `short_states`: fewer states than tokens, as when a prefix cache skips the shared part
    (vllm-project/vllm#44485); `token_mismatch`: the states belong to other tokens
    (sgl-project/sglang#4997). Only unfinished requests are held. Raises InputError for a request id
    that was not asked or is already complete.
    """
    pending = {request_id: _Open() for request_id in asked}
    for piece in pieces:
        if piece.request_id not in pending:
            raise InputError(
                f"the engine returned states for request `{piece.request_id}`, which is not waited for",
                hint="request ids must be unique, and the engine must not be shared with another run",
            )
        answer = pending[piece.request_id]
        wrong = _add(answer, piece, slots)
        wanted = asked[piece.request_id]
        if wrong is not None:
            del pending[piece.request_id]
            yield wrong
        elif answer.count >= len(wanted):
            del pending[piece.request_id]
            yield _whole(piece.request_id, answer, wanted, slots)
    for request_id, answer in pending.items():
        yield Dropped(
            request_id,
            "short_states",
            f"{answer.count} states for {len(asked[request_id])} tokens; turn prefix caching off in the engine",
        )


def _add(answer: _Open, piece: Piece, slots: Sequence[str]) -> Dropped | None:
    lengths = {slot: len(piece.states[slot]) if slot in piece.states else 0 for slot in slots}
    for slot, length in lengths.items():
        if length != len(piece.token_ids):
            detail = f"slot {slot} has {length} states for {len(piece.token_ids)} tokens of one piece"
            return Dropped(piece.request_id, "short_states", detail)
    answer.tokens.append(piece.token_ids)
    for slot in slots:
        answer.states.setdefault(slot, []).append(piece.states[slot])
    answer.count += len(piece.token_ids)
    return None


def _whole(request_id: str, answer: _Open, wanted: NDArray[np.int32], slots: Sequence[str]) -> Collected | Dropped:
    tokens = np.concatenate(answer.tokens)
    if not np.array_equal(tokens, wanted):
        at = int(np.argmax(tokens[: len(wanted)] != wanted)) if len(tokens) == len(wanted) else len(wanted)
        return Dropped(request_id, "token_mismatch", f"the states belong to other tokens, from position {at} on")
    return Collected(request_id, {slot: np.concatenate(answer.states[slot]) for slot in slots})

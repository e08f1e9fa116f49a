"""States returned by request: any order, any chunks, and never another request's."""

import numpy as np
import pytest

from specctl.core.collect import Collected, Piece, collect
from specctl.errors import InputError
from specctl.records.sample import Dropped

SLOTS = ("2", "norm")


def ids(length: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def piece(name: str, tokens: np.ndarray, value: float, *, rows: int | None = None) -> Piece:
    """States whose every value is the number of their request."""
    count = len(tokens) if rows is None else rows
    return Piece(name, tokens, {slot: np.full((count, 4), value, np.float32) for slot in SLOTS})


def test_answers_out_of_order_keep_their_own_tokens_and_states() -> None:
    """With a batch, one request's states landed in another's output (sgl-project/sglang#4997)."""
    asked = {"0": ids(3), "1": ids(5, 10), "2": ids(2, 20)}
    pieces = [piece(name, asked[name], float(name)) for name in ("2", "0", "1")]
    found = list(collect(pieces, asked, SLOTS))
    assert [c.request_id for c in found] == ["2", "0", "1"]
    for answer in found:
        assert isinstance(answer, Collected)
        for slot in SLOTS:
            assert answer.states[slot].shape == (len(asked[answer.request_id]), 4)
            assert (answer.states[slot] == float(answer.request_id)).all()


def test_chunks_are_joined_also_when_two_requests_interleave() -> None:
    asked = {"a": ids(10), "b": ids(4, 50)}
    pieces = [piece("a", ids(6), 1), piece("b", ids(1, 50), 2), piece("a", ids(4, 6), 1), piece("b", ids(3, 51), 2)]
    found = {c.request_id: c for c in collect(pieces, asked, SLOTS)}
    assert {name: c.states["2"].shape[0] for name, c in found.items()} == {"a": 10, "b": 4}


def test_fewer_states_than_tokens_are_refused_named_and_counted() -> None:
    """A prefix cache skipped 64 tokens; the trainer died 1,570 steps later (vllm-project/vllm#44485)."""
    (refused,) = collect([piece("a", ids(6), 1)], {"a": ids(10)}, SLOTS)
    assert isinstance(refused, Dropped)
    assert (refused.where, refused.reason) == ("a", "short_states")
    assert "6 states for 10 tokens" in refused.detail
    assert "prefix caching off" in refused.detail


def test_a_slot_shorter_than_its_tokens_is_refused() -> None:
    (refused,) = collect([piece("a", ids(10), 1, rows=6)], {"a": ids(10)}, SLOTS)
    assert isinstance(refused, Dropped)
    assert refused.reason == "short_states"


def test_a_request_that_never_comes_back_is_refused() -> None:
    found = list(collect([], {"a": ids(3)}, SLOTS))
    assert [d.reason for d in found if isinstance(d, Dropped)] == ["short_states"]


@pytest.mark.parametrize("tokens", [ids(10, 1), np.concatenate([ids(9), ids(1, 99)]), ids(11)])
def test_states_of_other_tokens_are_refused(tokens: np.ndarray) -> None:
    (refused,) = collect([piece("a", tokens, 1)], {"a": ids(10)}, SLOTS)
    assert isinstance(refused, Dropped)
    assert refused.reason == "token_mismatch"


def test_a_request_that_nobody_made_is_an_error() -> None:
    with pytest.raises(InputError, match="request `x`"):
        list(collect([piece("x", ids(1), 1)], {"a": ids(1)}, SLOTS))

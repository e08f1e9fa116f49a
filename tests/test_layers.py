"""Boundary ids: what `--layers` accepts and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specctl.errors import UsageError
from specctl.records.layers import aux_boundaries, parse_slots


@pytest.mark.parametrize(("depth", "ids"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27)), (36, (2, 18, 33))])
def test_the_default_boundaries_of_eagle3(depth: int, ids: tuple[int, ...]) -> None:
    assert aux_boundaries(depth) == ids


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5, 6])
def test_a_target_too_shallow_for_three_distinct_ids_is_refused(depth: int) -> None:
    """De-duplicating hides the collision until a matmul fails (NVIDIA-NeMo/Automodel#2256)."""
    with pytest.raises(UsageError) as caught:
        aux_boundaries(depth)
    assert "too shallow, pass three distinct ids" in str(caught.value.hint)


def test_last_is_the_number_of_layers_not_one_less() -> None:
    assert parse_slots("0,4,last", 8) == ("0", "4", "8")


@pytest.mark.parametrize("wrong", ["9", "-1", "100"])
def test_an_id_outside_the_target_is_refused_with_the_range(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"0\.\.8"):
        parse_slots(wrong, 8)


@pytest.mark.parametrize("wrong", ["2,2,5", "last,8", "norm,norm"])
def test_an_id_given_twice_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_slots(wrong, 8)


@pytest.mark.parametrize("wrong", ["", "2,,3", "first", "2.5", "2;3"])
def test_what_is_no_id_is_refused_naming_the_words_there_are(wrong: str) -> None:
    with pytest.raises(UsageError, match="`last`, `norm`, `all` or `aux`"):
        parse_slots(wrong, 8)


def test_all_is_every_boundary_and_norm_is_its_own_slot() -> None:
    assert parse_slots("all", 3) == ("0", "1", "2", "3")
    assert parse_slots("norm,all", 3) == ("0", "1", "2", "3", "norm")


def test_a_word_that_overlaps_with_ids_adds_no_second_copy() -> None:
    assert parse_slots("aux,2,norm", 8) == ("2", "4", "5", "norm")


@given(st.sets(st.integers(0, 12), min_size=1))
def test_slots_come_in_depth_order_whatever_order_was_given(ids: set[int]) -> None:
    """Engines capture in depth order (vllm-project/vllm#50514)."""
    text = ",".join(map(str, sorted(ids, reverse=True)))
    assert parse_slots(text, 12) == tuple(map(str, sorted(ids)))

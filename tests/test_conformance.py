"""What conformance gives to a real server is complete; the server itself is asked by `make conformance`."""

import pytest

from conformance.claims import CRASHES, NOT_GIVEN, REFUSED, SERVED, why_not
from conformance.rows import Row, table
from fixtures.broken import BROKEN
from specctl.recipes.check import rules

ERRORS = [rule.id for rule in rules() if rule.level == "error"]


@pytest.mark.parametrize("rule", ERRORS)
def test_every_error_rule_is_given_to_the_server_or_says_why_not(rule: str) -> None:
    made = BROKEN[rule]()
    is_left_out = why_not(rule, made.options, has_own_target=made.target is not None) is not None
    assert (rule in REFUSED) + (rule in SERVED) + is_left_out == 1


def test_no_claim_is_of_a_rule_that_is_none() -> None:
    assert set(ERRORS) >= REFUSED | SERVED | set(NOT_GIVEN)
    assert CRASHES <= REFUSED


def test_a_row_that_does_not_hold_stands_out_and_no_cell_breaks_the_table() -> None:
    text = table("Rules", [Row("a|b", "refused", "two\nlines", False)])
    assert "| a\\|b | refused | two lines | **no** |" in text

"""Estimates, differences and verdicts, and the tables that an evaluation comes to. No torch."""

from dataclasses import dataclass
from typing import Final

from specctl.errors import EXIT_NO, EXIT_UNDECIDED, EXIT_YES

WITHIN: Final = "within"
OUT: Final = "out"
UNDECIDED: Final = "undecided"
EXIT_CODES: Final = {WITHIN: EXIT_YES, OUT: EXIT_NO, UNDECIDED: EXIT_UNDECIDED}


@dataclass(frozen=True, slots=True)
class Estimate:
    """An acceptance length over prompts; no value where nothing was drafted, no interval for one prompt."""

    value: float | None
    low: float | None
    high: float | None
    prompts: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Second less first, on the same prompts; the relative one is of the first. `spread` is the standard
    error of the relative one. None where nothing was drafted, or where one prompt gives no interval."""

    prompts: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    relative: float | None = None
    relative_low: float | None = None
    relative_high: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """`outcome` is WITHIN, OUT or UNDECIDED; undecided, so many prompts at least would tell, if that can be said."""

    outcome: str
    prompts_needed: int | None = None

    @property
    def exit_code(self) -> int:
        """0 within, 1 out, 3 undecided."""
        return EXIT_CODES[self.outcome]


@dataclass(frozen=True, slots=True)
class CategoryRow:
    """The prompts of one category at one size."""

    name: str
    length: Estimate
    tokens_per_step: float | None


@dataclass(frozen=True, slots=True)
class SizeRow:
    """One size. Positions are listed up to K; a rate is None where nothing was proposed.

    `difference` and `decision` are against the row named `against`. `lengths` are the acceptance lengths of
    the prompts, for their distribution.
    """

    name: str
    pp: int
    tp: int
    prompts: int
    steps: int
    drafts: int
    length: Estimate
    macro_mean: float | None
    tokens_per_step: float | None
    joint_rates: tuple[float | None, ...]
    conditional_rates: tuple[float | None, ...]
    tokens: int
    tokens_per_second: float | None
    plain_tokens_per_second: float | None
    speed_up: float | None
    bytes_per_token: float | None
    categories: tuple[CategoryRow, ...]
    lengths: tuple[float, ...]
    against: str | None = None
    difference: Difference | None = None
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class BaselineRow:
    """A proposer without a draft on the same texts. `drafted_share` of the steps it proposed anything."""

    name: str
    length: Estimate
    tokens_per_step: float | None
    drafted_share: float | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a greedy text leaves that of the size it is compared with: token `index`, counted from 0.

    A token is None where the text had ended. Gaps are those of the two best logits there. `is_near` says that
    rounding can explain it; None where no gap or no dtype is known.
    """

    id: str
    turn: int
    size: str
    against: str
    index: int
    token: int | None
    other_token: int | None
    gap: float | None
    other_gap: float | None
    is_near: bool | None


@dataclass(frozen=True, slots=True)
class Judgement:
    """The tables and what they come to. `outcome` is None where nothing was compared; then `exit_code` is 0."""

    rows: tuple[SizeRow, ...]
    baselines: tuple[BaselineRow, ...]
    divergences: tuple[Divergence, ...]
    tolerance: float
    outcome: str | None
    prompts_needed: int | None
    sentence: str
    exit_code: int
    notes: tuple[str, ...] = ()

"""Rules of the checkpoint contract and what breaking one looks like. Knows no rule.

A rule is one function over what is known of a checkpoint; it yields what it found. Its id is stable.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Level = Literal["error", "warning", "note"]
LEVELS: Final[tuple[Level, ...]] = ("error", "warning", "note")
"""error: will not load, or is provably wrong. warning: loads and loses acceptance, or depends on the
version. note: worth knowing."""

Need = Literal["target", "deep", "vllm", "sglang", "pp"]
"""What has to be given before a rule can speak: a target, `--deep`, one runtime, pipeline stages."""

KeyPath = tuple[str, ...]
"""A key of config.json, from the outside in."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The one right way to mend a finding, as edits of config.json and of the tensors.

    `set` and `unset` name config keys; `rename` maps tensor names; `drop` removes tensors; `replace`
    gives tensors new contents (a `Source` by name). Applied to a copy, never in place.
    """

    set: Mapping[KeyPath, Any] = field(default_factory=dict)
    unset: tuple[KeyPath, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    replace: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """One place where a rule is broken. `level` overrides the rule's where this case is milder or worse.

    `expected` and `found` complete the sentences "expected ..." and "found ...".
    """

    where: str
    expected: str
    found: str
    fix: str | None = None
    level: Level | None = None
    repair: Repair | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the contract.

    `says` is a headline of at most ten words; `story` tells somebody who has never met the rule what
    goes wrong and why nobody notices; `since` says from or up to which version of a runtime it holds.
    """

    id: str
    level: Level
    says: str
    story: str
    fix: str
    source: str
    check: Callable[[Any], Iterable[Found]]
    needs: tuple[Need, ...] = ()
    since: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule, ready to be shown."""

    rule: str
    level: Level
    says: str
    where: str
    expected: str
    found: str
    fix: str
    source: str
    is_repairable: bool


def rule(
    id: str,
    level: Level,
    says: str,
    *,
    story: str,
    fix: str,
    source: str,
    needs: tuple[Need, ...] = (),
    since: str | None = None,
) -> Callable[[Callable[[Any], Iterable[Found]]], Rule]:
    """Make the decorated function the rule's check."""

    def make(check: Callable[[Any], Iterable[Found]]) -> Rule:
        return Rule(id, level, says, story, fix, source, check, needs, since)

    return make


def rules_in(names: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules among a module's names, in the order they were written."""
    return tuple(value for value in names.values() if isinstance(value, Rule))

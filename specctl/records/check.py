"""What a check of a draft is asked, and what it answers. No rule, no file."""

from dataclasses import dataclass, field

from specctl.records.contract import Finding


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """What to check, and for whom.

    `runtime_version` None means the newest release whose source the rules were read from; `layout`
    None means that it is recognised; `fix` is a folder that gets a repaired copy.
    """

    draft: str
    target: str | None = None
    runtime: str = "vllm"
    runtime_version: str | None = None
    pp: int = 1
    deep: bool = False
    fix: str | None = None
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings, worst first, and what follows from them.

    `aux_ids` are the boundary ids whose states the runtime will hand to the draft, None where that
    takes a target to know; `declared_aux_ids` those that the checkpoint means. `serve` is the command
    that serves a passing draft; `instead` what to do with one that does not pass.
    """

    draft: str
    layout: str
    container: str
    tensors: int
    bytes: int
    runtime: str
    runtime_version: str
    pp: int
    deep: bool
    target: str | None
    is_parallel: bool
    aux_ids: tuple[int, ...] | None
    declared_aux_ids: tuple[int, ...] | None
    embedding: str
    findings: tuple[Finding, ...]
    errors: int
    warnings: int
    notes: int
    passes: bool
    serve: str | None
    instead: tuple[str, ...]
    fixed: "FixReport | None" = None


@dataclass(frozen=True, slots=True)
class FixReport:
    """A repaired copy: what was changed, rule by rule, and what a check of the copy says."""

    out: str
    repaired: tuple[str, ...]
    changes: tuple[str, ...]
    check: CheckReport
    notes: tuple[str, ...] = field(default=())

"""Check a draft checkpoint against the contract of a runtime. No torch: headers, config and small tables.

`--deep` reads the tensors too, in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from specctl import plugins
from specctl.errors import InputError, UsageError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.hub import local_folder
from specctl.files.regular import shown
from specctl.files.serverview import release
from specctl.files.subject import Subject
from specctl.files.target import read_target
from specctl.recipes.serve import instead_of, serve_command
from specctl.records.check import CheckConfig, CheckReport
from specctl.records.contract import LEVELS, Finding, Found, Repair, Rule
from specctl.records.progress import Reporter
from specctl.records.runtimes import NEWEST, Runtime, Version

KIND: Final = "kind"
MAX_LIKE_FINDINGS: Final = 5
LONGEST_PART: Final = 300
"""Characters of one part of a finding: it quotes foreign files, which may hold a list of a million ids."""

_VERSION: Final = re.compile(
    r"v?([0-9]{1,6}(?:\.[0-9]{1,6}){0,3})"
    r"(?:[-_.]?(?:alpha|beta|preview|pre|rc|a|b|c)[-_.]?[0-9]{0,9})?"
    r"(?:-[0-9]{1,9}|[-_.]?(?:post|rev|r)[-_.]?[0-9]{0,9})?"
    r"(?:[-_.]?dev[-_.]?[0-9]{0,9})?"
    r"(?:\+[a-z0-9]{1,60}(?:[-_.][a-z0-9]{1,60}){0,9})?",
    re.IGNORECASE,
)
"""PEP 440 without epochs: release, then pre, post, dev and local part."""


def rules() -> tuple[Rule, ...]:
    """Every rule of every contract, in reading order."""
    return tuple(rule for name in plugins.names("contracts") for rule in plugins.load("contracts", name).RULES)


def explain(rule_id: str) -> Rule:
    """The rule called `rule_id`. Raises UsageError with the nearest ids."""
    import difflib

    known = {rule.id: rule for rule in rules()}
    wanted = rule_id.upper().replace("-", "_")
    if wanted not in known:
        near = [name for name in known if name.startswith(wanted)][:3] or difflib.get_close_matches(wanted, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`specctl check-ckpt --rules` lists them"
        raise UsageError(f"no rule is called `{rule_id}`", hint=hint)
    return known[wanted]


def check(config: CheckConfig, reporter: Reporter) -> CheckReport:
    """Every finding about a draft, worst first, and how to serve it.

    Raises InputError where there is nothing to check, UsageError for a runtime or version that is none.
    """
    subject = look_at(config)
    raised = broken_rules(subject, reporter)
    return report_on(subject, raised, config)


def look_at(config: CheckConfig, folder: Path | None = None) -> Subject:
    """The draft of `config` (or the copy in `folder`) as its runtime would read it."""
    if config.runtime not in NEWEST:
        raise UsageError(f"`--runtime {config.runtime}` is no runtime", hint=f"there are: {', '.join(NEWEST)}")
    if config.pp < 1:
        raise UsageError(f"`--pp {config.pp}` is no number of pipeline stages; it is 1 or more")
    runtime = config.runtime
    version = parse_version(config.runtime_version, runtime)
    checkpoint = open_checkpoint(folder or local_folder(config.draft, what="draft"))
    name = config.layout or plugins.recognise(checkpoint) or "vllm"
    layout = plugins.load_format(name)
    facts = read_target(local_folder(config.target, what="target")) if config.target is not None else None
    target = facts.facts if facts is not None else None
    declared = layout.aux_ids(checkpoint, target.num_layers if target is not None else None)
    return Subject(
        checkpoint=checkpoint,
        layout=name,
        runtime=runtime,
        version=version,
        pp=config.pp,
        target=target,
        embedding=facts.embedding if facts is not None else None,
        declared_aux=declared,
        is_deep=config.deep,
    )


def parse_version(text: str | None, runtime: Runtime) -> Version:
    """The release of `0.33.0`, `v0.33`, `0.34.0rc1` or `0.5.10.post1+cu129` as numbers. Raises UsageError."""
    if text is None:
        return NEWEST[runtime]
    match = _VERSION.fullmatch(text.strip())
    if match is None:
        newest = release(NEWEST[runtime])
        raise UsageError(f"`--runtime-version {shown(text, 60)}` is no version", hint=f"it has the form {newest}")
    return tuple(int(part) for part in match.group(1).split("."))


def broken_rules(subject: Subject, reporter: Reporter) -> list[tuple[Rule, Found]]:
    """What each rule found, worst level first, then in the order of the rules."""
    raised: list[tuple[Rule, Found]] = []
    if subject.is_deep:
        reporter.note("reading every tensor")
    other = [(rule, found) for rule in plugins.load("contracts", KIND).RULES for found in _found(rule, subject)]
    # A folder that is no head at all differs in everything; only its kind and its files are worth a word.
    names = (KIND, "files") if other else plugins.names("contracts")
    for rule in (rule for name in names for rule in plugins.load("contracts", name).RULES):
        if _applies(rule, subject):
            raised.extend((rule, found) for found in _shortened(list(_found(rule, subject))))
    return sorted(raised, key=lambda item: LEVELS.index(item[1].level or item[0].level))


def _shortened(found: list[Found]) -> list[Found]:
    """The first few findings of one rule, and how many more there are."""
    if len(found) <= MAX_LIKE_FINDINGS:
        return found
    rest = found[MAX_LIKE_FINDINGS:]
    repairs = [one.repair for one in rest if one.repair is not None]
    repair = _together(repairs) if len(repairs) == len(rest) else None
    last = replace(found[-1], where="...", found=f"{len(rest)} more like these", repair=repair)
    return [*found[:MAX_LIKE_FINDINGS], last]


def _together(repairs: list[Repair]) -> Repair:
    """All of several repairs as one; where two say something of the same key the later one stays."""
    return Repair(
        set={path: value for one in repairs for path, value in one.set.items()},
        unset=tuple(path for one in repairs for path in one.unset),
        rename={old: new for one in repairs for old, new in one.rename.items()},
        drop=tuple(name for one in repairs for name in one.drop),
        replace={name: source for one in repairs for name, source in one.replace.items()},
    )


def report_on(subject: Subject, raised: list[tuple[Rule, Found]], config: CheckConfig) -> CheckReport:
    """The report of a check."""
    findings = tuple(_finding(rule, found) for rule, found in raised)
    count = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    passes = count["error"] == 0
    return CheckReport(
        draft=config.draft,
        layout=subject.layout,
        container=subject.checkpoint.container,
        tensors=len(subject.checkpoint.tensors),
        bytes=sum(entry.nbytes for entry in subject.checkpoint.tensors.values()),
        runtime=subject.runtime,
        runtime_version=release(subject.version),
        pp=subject.pp,
        deep=subject.is_deep,
        target=config.target,
        is_parallel=subject.is_parallel,
        aux_ids=subject.effective_aux if subject.head is None or subject.head.use_aux else (),
        declared_aux_ids=subject.declared_aux,
        embedding=_embedding(subject),
        findings=findings,
        errors=count["error"],
        warnings=count["warning"],
        notes=count["note"],
        passes=passes,
        serve=serve_command(subject, config.draft, config.target) if passes else None,
        instead=() if passes else instead_of(subject, findings, config.draft),
    )


def _applies(rule: Rule, subject: Subject) -> bool:
    given = {
        "target": subject.target is not None,
        "deep": subject.is_deep,
        "vllm": subject.runtime == "vllm",
        "sglang": subject.runtime == "sglang",
        "pp": subject.pp > 1,
    }
    return all(given[need] for need in rule.needs)


def _found(rule: Rule, subject: Subject) -> Iterator[Found]:
    try:
        yield from rule.check(subject)
    except InputError as error:
        # A table that shrank or vanished between its header and its numbers.
        raise InputError(error.message, where=error.where or str(subject.checkpoint.folder), hint=error.hint) from error


def _finding(rule: Rule, found: Found) -> Finding:
    return Finding(
        rule=rule.id,
        level=found.level or rule.level,
        says=rule.says,
        where=shown(found.where, LONGEST_PART),
        expected=shown(found.expected, LONGEST_PART),
        found=shown(found.found, LONGEST_PART),
        fix=found.fix or rule.fix,
        source=rule.source,
        is_repairable=found.repair is not None,
    )


def _embedding(subject: Subject) -> str:
    """Which table embeds the draft's tokens, and on which stage it stands."""
    head = subject.head
    stage = "" if subject.pp == 1 else f", on stage {subject.pp - 1}, which runs the draft"
    if "embed_tokens.weight" not in subject.tensors:
        return f"the target's{stage}"
    is_replaced = subject.runtime == "sglang" and head is not None and head.hidden_size == head.target_hidden_size
    return f"the target's, in place of the draft's own{stage}" if is_replaced else f"the draft's own{stage}"

"""A repaired copy of a draft: every finding that has exactly one right repair, never in place.

Repairs are edits of config.json and of the table of tensors. One repair can uncover the next finding,
so the copy is checked and repaired again until nothing is left to repair.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from specctl.errors import ContractError, InputError, UsageError
from specctl.files.checkpoint import HARMLESS, Checkpoint
from specctl.files.durable import copy_plain, new_folder
from specctl.files.headfolder import write_head
from specctl.files.regular import shown
from specctl.files.subject import Subject
from specctl.files.tensors import Source
from specctl.recipes.check import broken_rules, check, look_at, report_on
from specctl.records.check import CheckConfig, CheckReport, FixReport
from specctl.records.contract import Found, KeyPath, Repair, Rule
from specctl.records.progress import Reporter

MAX_ROUNDS: Final = 6
"""Each round mends at least one finding; names, config and tables rarely take more than two."""
MAX_CHANGES: Final = 300
"""Lines of what was changed; a head has a few dozen tensors, a hostile one a hundred thousand."""
SIDE_SUFFIXES: Final = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".vocab", ".bpe")
"""Of files that go along: tokenizers, chat templates and settings, which name no code and hold no weights."""
MAX_SIDE_BYTES: Final = 64 << 20


def check_and_fix(config: CheckConfig, reporter: Reporter) -> CheckReport:
    """Check a draft and write a repaired copy to `config.fix`; the report holds the check of the copy.

    Raises ContractError where nothing of it can be repaired or the files leave open what is meant, UsageError
    where the folder exists.
    """
    from dataclasses import replace

    assert config.fix is not None
    out = Path(config.fix).expanduser()
    source = Path(config.draft).expanduser()
    if source.exists() and out.resolve().is_relative_to(source.resolve()):
        raise UsageError("`--fix` writes a copy, and not into the draft's own folder", hint="name a folder elsewhere")
    subject = look_at(config)
    raised = broken_rules(subject, reporter)
    report = report_on(subject, raised, config)
    _refuse_doubt(subject, raised, config)
    if not any(found.repair for _, found in raised):
        if not report.findings:
            return report
        first = report.findings[0]
        raise ContractError(
            f"nothing was written: none of the {len(report.findings)} findings has exactly one right repair",
            where=config.draft,
            hint=f"the worst is {first.rule}: {first.fix}",
        )
    with new_folder(out, "a repaired draft") as folder:
        repaired, changes = _rounds(subject, raised, folder, config, reporter)
    copied = check(replace(config, draft=config.fix, fix=None), reporter)
    return replace(report, fixed=FixReport(str(config.fix), tuple(repaired), tuple(changes), copied))


def _refuse_doubt(subject: Subject, raised: Sequence[tuple[Rule, Found]], config: CheckConfig) -> None:
    """Raises ContractError for files that leave open what is meant: a repair would launder the loss of a shard."""
    in_doubt = [(p.rule, p.expected, p.found) for p in subject.checkpoint.problems if p.rule not in HARMLESS]
    in_doubt += [(rule.id, found.expected, found.found) for rule, found in raised if rule.id == "NAME_TWICE"]
    for rule_id, expected, found in in_doubt[:1]:
        raise ContractError(
            f"nothing was written, as it is open what is meant: {rule_id}, expected {shown(expected)} "
            f"and found {shown(found)}",
            where=config.draft,
            hint=f"mend this by hand first; `specctl check-ckpt --explain {rule_id}` says how",
        )


def _rounds(
    subject: Subject, raised: Sequence[tuple[Rule, Found]], folder: Path, config: CheckConfig, reporter: Reporter
) -> tuple[list[str], list[str]]:
    repaired: list[str] = []
    changes: list[str] = []
    for number in range(MAX_ROUNDS):
        repairs = [(rule.id, found.repair) for rule, found in raised if found.repair is not None]
        if not repairs:
            break
        step = folder / f".round-{number}"
        changes += _write(subject, [repair for _, repair in repairs], step)
        changes += _copy_sides(subject.checkpoint, step)
        repaired += [rule_id for rule_id, _ in repairs if rule_id not in repaired]
        subject = look_at(config, step)
        raised = broken_rules(subject, reporter)
    for file in step.iterdir():
        file.replace(folder / file.name)
    for left in folder.glob(".round-*"):
        shutil.rmtree(left)
    if len(changes) > MAX_CHANGES:
        changes = [*changes[:MAX_CHANGES], f"{len(changes) - MAX_CHANGES} more changes"]
    return repaired, changes


def _copy_sides(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy the plain small files beside the weights; returns what stays behind, one line each."""
    left = []
    for name in checkpoint.side_files:
        is_setting = (
            name.endswith(SIDE_SUFFIXES) and not name.endswith(".index.json") and not name.startswith("adapter_")
        )
        try:
            if is_setting and copy_plain(checkpoint.folder / name, folder / name, limit=MAX_SIDE_BYTES):
                continue
        except InputError:
            pass  # cannot be read, or has a name that can only be shown: it stays behind like any other
        left.append(f"{name}: not copied")
    return left


def _write(subject: Subject, repairs: Sequence[Repair], folder: Path) -> list[str]:
    """The subject's checkpoint with `repairs` in `folder`; returns what changed, one line each."""
    settings: dict[str, Any] = copy.deepcopy(dict(subject.raw))
    tensors: dict[str, Source] = dict(subject.checkpoint.tensors)
    changes: list[str] = []
    for repair in repairs:
        for path in repair.unset:
            changes += _unset(settings, path)
        for path, value in repair.set.items():
            changes += _set(settings, path, value)
        tensors |= repair.replace
        changes += [f"{shown(name)}: new contents" for name in repair.replace]
        changes += [f"{shown(name)}: dropped" for name in repair.drop if tensors.pop(name, None) is not None]
    renames = _renames(repairs)
    changes += [f"{shown(old)} -> {shown(new)}" for old, new in renames.items()]
    folder.mkdir()
    named = {renames.get(name, name): source for name, source in tensors.items()}
    if len(named) != len(tensors):
        raise ContractError(
            "nothing was written: after the repair two tensors would have one name",
            where=str(subject.checkpoint.folder),
            hint="drop one of the two that mean the same place of the head",
        )
    write_head(folder, settings, named)
    return changes


def _renames(repairs: Sequence[Repair]) -> dict[str, str]:
    """Of two repairs that rename one tensor the first acts; the next round sees to the second."""
    renames: dict[str, str] = {}
    for repair in repairs:
        for old, new in repair.rename.items():
            renames.setdefault(old, new)
    return renames


def _set(settings: dict[str, Any], path: KeyPath, value: Any) -> list[str]:
    inner = settings
    for key in path[:-1]:
        if not isinstance(inner.get(key), dict):
            inner[key] = {}
        inner = inner[key]
    before = inner.get(path[-1], None)
    if path[-1] in inner and before == value and type(before) is type(value):
        return []
    inner[path[-1]] = value
    said = shown(json.dumps(before)) if before is not None else "nothing"
    return [f"config.json: {'.'.join(path)}: {said} -> {shown(json.dumps(value))}"]


def _unset(settings: dict[str, Any], path: KeyPath) -> list[str]:
    inner: Any = settings
    for key in path[:-1]:
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    if not isinstance(inner, dict) or path[-1] not in inner:
        return []
    del inner[path[-1]]
    return [f"config.json: {'.'.join(path)}: removed"]

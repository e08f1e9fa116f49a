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

from specctl.errors import ContractError, UsageError
from specctl.files import safetensors
from specctl.files.durable import new_folder, sync_file
from specctl.files.subject import Subject
from specctl.files.tensors import Source
from specctl.recipes.check import broken_rules, check, look_at, report_on
from specctl.records.check import CheckConfig, CheckReport, FixReport
from specctl.records.contract import Found, KeyPath, Repair, Rule
from specctl.records.progress import Reporter

MAX_ROUNDS: Final = 6
"""Each round mends at least one finding; names, config and tables rarely take more than two."""


def check_and_fix(config: CheckConfig, reporter: Reporter) -> CheckReport:
    """Check a draft and write a repaired copy to `config.fix`; the report holds the check of the copy.

    Raises ContractError where nothing of it can be repaired, UsageError where the folder exists.
    """
    from dataclasses import replace

    assert config.fix is not None
    out = Path(config.fix).expanduser()
    source = Path(config.draft).expanduser()
    if source.exists() and out.exists() and out.resolve() == source.resolve():
        raise UsageError("`--fix` writes a copy and cannot write over the draft itself", hint="name a new folder")
    subject = look_at(config)
    raised = broken_rules(subject, reporter)
    report = report_on(subject, raised, config)
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
        repaired += [rule_id for rule_id, _ in repairs if rule_id not in repaired]
        subject = look_at(config, step)
        raised = broken_rules(subject, reporter)
    for file in step.iterdir():
        file.replace(folder / file.name)
    for left in folder.glob(".round-*"):
        shutil.rmtree(left)
    return repaired, changes


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
        changes += [f"{name}: new contents" for name in repair.replace]
        changes += [f"{name}: dropped" for name in repair.drop if tensors.pop(name, None) is not None]
    renames = _renames(repairs)
    changes += [f"{old} -> {new}" for old, new in renames.items()]
    folder.mkdir()
    named = {renames.get(name, name): source for name, source in tensors.items()}
    safetensors.write(folder / "model.safetensors", named, {"format": "pt"})
    config_file = folder / "config.json"
    config_file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync_file(config_file)
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
    said = json.dumps(before) if before is not None else "nothing"
    return [f"config.json: {'.'.join(path)}: {said} -> {json.dumps(value)}"]


def _unset(settings: dict[str, Any], path: KeyPath) -> list[str]:
    inner: Any = settings
    for key in path[:-1]:
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    if not isinstance(inner, dict) or path[-1] not in inner:
        return []
    del inner[path[-1]]
    return [f"config.json: {'.'.join(path)}: removed"]

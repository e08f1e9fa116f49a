"""The command that serves a draft, and what to do with one that does not pass."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from specctl.errors import SpecctlError, UsageError
from specctl.files.serverview import PER_REQUEST, PER_REQUEST_SINCE, sglang_speculation, vllm_speculation
from specctl.files.subject import Subject
from specctl.records.contract import Finding
from specctl.records.progress import SilentReporter

DEFAULT_DRAFT_TOKENS: Final = 3
CONVERTIBLE: Final = ("NAME_PREFIX", "ARCH_UNKNOWN", "LAYERS_COUNT", "D2T_UNNEEDED", "SPECULATORS_SGLANG")
"""Findings that a conversion to the runtime's own layout mends."""


def said_tokens(subject: Subject) -> int | None:
    """How many tokens the head says to draft at once, None where it does not say."""
    proposals = _mapping(subject.raw.get("speculators_config")).get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    said = [
        subject.raw.get("num_draft_tokens"),
        subject.raw.get("num_depths"),
        _mapping(first).get("speculative_tokens"),
    ]
    return next((number for number in said if type(number) is int and 0 < number <= 128), None)


def serve_command(subject: Subject, draft: str, target: str | None) -> str:
    """One shell command that serves the target with this draft."""
    tokens = said_tokens(subject) or DEFAULT_DRAFT_TOKENS
    if Path(draft).is_file():
        draft = str(Path(draft).parent)
    model = shlex.quote(target) if target is not None else "TARGET"
    if subject.runtime == "vllm":
        settings = vllm_speculation(draft, tokens, is_parallel=subject.is_parallel)
        stages = f" --pipeline-parallel-size {subject.pp}" if subject.pp > 1 else ""
        # With it `eval --endpoint` counts each request by itself.
        told = f" {PER_REQUEST} detailed" if subject.version >= PER_REQUEST_SINCE else ""
        return f"vllm serve {model}{stages} --speculative-config {shlex.quote(json.dumps(settings))}{told}"
    return f"python -m sglang.launch_server --model-path {model} {shlex.join(sglang_speculation(draft, tokens))}"


def instead_of(subject: Subject, findings: Sequence[Finding], draft: str) -> tuple[str, ...]:
    """What to do with a draft that has errors, most useful first."""
    errors = [finding for finding in findings if finding.level == "error"]
    steps: list[str] = []
    if any(finding.rule == "PARALLEL_SGLANG" for finding in errors):
        steps.append(f"serve it with vLLM: specctl check-ckpt {shlex.quote(draft)} --runtime vllm")
    if any(finding.rule in CONVERTIBLE for finding in errors) and subject.layout != subject.runtime:
        command = f"specctl convert {shlex.quote(draft)} OUT --to {subject.runtime}"
        steps.append(f"convert it: {command}{_will_ask(subject, draft)}")
    if errors and all(finding.is_repairable for finding in errors):
        steps.append(f"repair a copy: specctl check-ckpt {shlex.quote(draft)} --fix OUT")
    elif any(finding.is_repairable for finding in errors):
        steps.append("`--fix OUT` repairs some of these in a copy; the others need you")
    return tuple(steps) or ("mend what the errors above name, then check again",)


def _will_ask(subject: Subject, draft: str) -> str:
    """What converting will want to know, so that the command does not fail as printed."""
    from specctl.recipes.convert import ConvertConfig, convert

    target = subject.target.folder if subject.target is not None else None
    config = ConvertConfig(draft, f"{draft}.converted", subject.runtime, target=target, dry_run=True)
    try:
        convert(config, SilentReporter())
    except UsageError as error:
        return f" (it needs to know more: {error.hint or error.message})"
    except SpecctlError:
        return " (once the errors that it names are mended)"
    return ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}

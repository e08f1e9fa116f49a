"""Counters that a server publishes in Prometheus text, and what they rose by. Only differences are used.

Gauges and running means are of the server's whole life and of all its users, and never read.
Source: prometheus.io/docs/instrumenting/exposition_formats, vllm v1/spec_decode/metrics.py (0.32, 0.33).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from specctl.errors import MachineError

_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL: Final = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED: Final = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a name, its labels, a value."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Counters:
    """What speculation came to so far: `per_position` are the accepted tokens, from the draft's first.

    `requests` are those that ended well, `written` and `read` the tokens of all answers and prompts, `started` the
    second the server's process began; None where not told.
    """

    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    requests: int | None
    started: float | None
    written: int | None = None
    read: int | None = None


def parse_samples(text: str, where: str) -> list[Sample]:
    """Every sample of a scrape, in its order. Raises MachineError naming the line that is none."""
    lines = enumerate(text.splitlines(), start=1)
    return [_sample(line, f"{where} line {number}") for number, line in lines if line.strip() and line[0] != "#"]


def read_counters(text: str, where: str) -> Counters | None:
    """The counters of a scrape, over all engines of the server; None where it publishes none of speculation.

    Raises MachineError for text that is no scrape and for values that are no counts.
    """
    samples = parse_samples(text, where)
    drafts = _sum(samples, "vllm:spec_decode_num_drafts", where)
    draft_tokens = _sum(samples, "vllm:spec_decode_num_draft_tokens", where)
    accepted = _sum(samples, "vllm:spec_decode_num_accepted_tokens", where)
    per_position = _per_position(samples, where)
    if drafts is None or draft_tokens is None or accepted is None or not per_position:
        return None
    started = [sample.value for sample in samples if sample.name == "process_start_time_seconds"]
    return Counters(
        drafts,
        draft_tokens,
        accepted,
        per_position,
        requests=_sum(samples, "vllm:request_success", where),
        started=max(started, default=None),
        written=_sum(samples, "vllm:generation_tokens", where),
        read=_sum(samples, "vllm:prompt_tokens", where),
    )


def tells_work(text: str, where: str) -> bool:
    """Whether a scrape counts what the server does; `--disable-log-stats` leaves that out."""
    samples = parse_samples(text, where)
    return any(_named(samples, f"vllm:{name}") for name in ("request_success", "generation_tokens"))


def risen(before: Counters, after: Counters, where: str) -> Counters:
    """What happened between two scrapes. Raises MachineError where the server was started anew in between."""
    change = Counters(
        drafts=after.drafts - before.drafts,
        draft_tokens=after.draft_tokens - before.draft_tokens,
        accepted=after.accepted - before.accepted,
        per_position=tuple(b - a for a, b in zip(before.per_position, after.per_position, strict=False)),
        requests=_rise(before.requests, after.requests),
        started=after.started,
        written=_rise(before.written, after.written),
        read=_rise(before.read, after.read),
    )
    more = (change.requests or 0, change.written or 0, change.read or 0)
    fell = min(change.drafts, change.draft_tokens, change.accepted, *change.per_position, *more) < 0
    if fell or before.started != after.started or len(before.per_position) != len(after.per_position):
        raise MachineError(
            "the server's counters began anew in the middle: it was started again, and the counts are lost",
            where=where,
            hint="run again once it stays up",
        )
    return change


def _rise(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _sample(line: str, where: str) -> Sample:
    match = _SAMPLE.fullmatch(line)
    labels = _labels(match.group(2) or "") if match is not None else None
    try:
        value = float(match.group(3)) if match is not None else None
    except ValueError:
        value = None
    if match is None or labels is None or value is None:
        raise MachineError(f"the server's metrics are not in Prometheus text format: `{line[:80]}`", where=where)
    return Sample(match.group(1), labels, value)


def _labels(text: str) -> dict[str, str] | None:
    """The labels between the braces, None where they are not written as labels are."""
    labels: dict[str, str] = {}
    at = 0
    while at < len(text.rstrip()):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        labels[match.group(1)] = _ESCAPED.sub(lambda m: "\n" if m.group(1) == "n" else m.group(1), match.group(2))
        at = match.end()
    return labels


def _named(samples: Iterable[Sample], name: str) -> list[Sample]:
    # Clients of the older text format write counters without the suffix.
    return [sample for sample in samples if sample.name in (name, f"{name}_total")]


def _sum(samples: Iterable[Sample], name: str, where: str) -> int | None:
    found = _named(samples, name)
    return sum(_count(sample, where) for sample in found) if found else None


def _per_position(samples: Iterable[Sample], where: str) -> tuple[int, ...]:
    """Sums over engines by the label `position`, which counts from 0; empty where a position is missing."""
    sums: dict[str, int] = {}
    for sample in _named(samples, "vllm:spec_decode_num_accepted_tokens_per_pos"):
        position = sample.labels.get("position", "")
        sums[position] = sums.get(position, 0) + _count(sample, where)
    return tuple(sums[str(i)] for i in range(len(sums))) if all(str(i) in sums for i in range(len(sums))) else ()


def _count(sample: Sample, where: str) -> int:
    if not math.isfinite(sample.value) or sample.value < 0 or sample.value != int(sample.value):
        raise MachineError(f"the counter `{sample.name}` is {sample.value}, and a count is expected", where=where)
    return int(sample.value)

"""Reads a result of `specctl eval` back from JSON, and refuses one whose counts contradict each other."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specctl.errors import InputError
from specctl.records.evaluation import (
    STOP_REASONS,
    UNTOLD,
    Baseline,
    Counts,
    EvalResult,
    PromptResult,
    SizeResult,
    Step,
)


def result_from_dict(data: object, where: str) -> EvalResult:
    """The result in `data`: what `to_dict` gave, alone or inside what `specctl eval --json` printed.

    `where` names the file in errors. Raises InputError when it is none, or its counts contradict each other.
    """
    inner = _inner(_object(data, where))
    if not isinstance(inner.get("sizes"), Sequence) or not isinstance(inner.get("settings"), Mapping):
        raise InputError(
            "expected a result of `specctl eval` and found no `settings` and `sizes`",
            where=where,
            hint="give a file that `specctl eval --json` wrote",
        )
    sizes = tuple(_size(item, place) for item, place in _items(inner, "sizes", where))
    if not sizes:
        raise InputError("expected at least one size and found none", where=f"{where}: sizes")
    versions = _object(inner.get("versions", {}), f"{where}: versions")
    baselines = tuple(_baseline(item, place) for item, place in _items(inner, "baselines", where, default=()))
    return EvalResult(inner["settings"], {k: str(v) for k, v in versions.items()}, sizes, baselines)


def _inner(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("report", "result"):
        held = data.get(key)
        data = held if isinstance(held, Mapping) else data
    return data


def _size(data: object, where: str) -> SizeResult:
    found = _object(data, where)
    results = tuple(_prompt(item, place) for item, place in _items(found, "results", where))
    counted = Counter((r.id, r.turn) for r in results)
    twice = [f"`{name}`, turn {turn}" for (name, turn), count in counted.items() if count > 1]
    if twice:
        raise InputError(f"prompt {twice[0]} stands twice", where=where)
    return SizeResult(
        pp=_integer(found, "pp", where, least=1),
        tp=_integer(found, "tp", where, least=1),
        results=results,
        seconds=_number(found, "seconds", where),
        plain_seconds=None if found.get("plain_seconds") is None else _number(found, "plain_seconds", where),
        plain_tokens=None if found.get("plain_tokens") is None else _integer(found, "plain_tokens", where),
        bytes_on_wire=None if found.get("bytes_on_wire") is None else _integer(found, "bytes_on_wire", where),
    )


def _prompt(data: object, where: str) -> PromptResult:
    found = _object(data, where)
    category = found.get("category")
    result = PromptResult(
        id=str(_get(found, "id", where)),
        category=None if category is None else str(category),
        turn=_integer(found, "turn", where),
        prompt_ids=_integers(found, "prompt_ids", where),
        tokens=_integers(found, "tokens", where),
        num_drafts=_integer(found, "num_drafts", where),
        proposed=_integers(found, "proposed", where),
        accepted=_integers(found, "accepted", where),
        steps=None
        if _get(found, "steps", where) is None
        else tuple(_step(item, place) for item, place in _items(found, "steps", where)),
        stop_reason=str(_get(found, "stop_reason", where)),
        gaps=None if found.get("gaps") is None else _gaps(found, where),
    )
    _refuse_contradiction(result, where)
    return result


def _refuse_contradiction(result: PromptResult, where: str) -> None:
    if result.steps is None:
        _refuse_impossible(result, where)
    counts = result.counts()
    if result.num_drafts != counts.num_drafts:
        raise InputError(f"`num_drafts` is {result.num_drafts}, and the steps give {counts.num_drafts}", where=where)
    for name, said, counted in (
        ("proposed", result.proposed, counts.proposed),
        ("accepted", result.accepted, counts.accepted),
    ):
        if _trimmed(said) != _trimmed(counted):
            raise InputError(f"`{name}` is {list(said)}, and the steps give {list(counted)}", where=where)
    if result.stop_reason not in STOP_REASONS:
        raise InputError(f"expected `eos` or `length` and found `{result.stop_reason}`", where=f"{where}: stop_reason")
    if result.gaps is not None and len(result.gaps) != len(result.tokens):
        raise InputError(f"{len(result.gaps)} gaps for {len(result.tokens)} tokens", where=f"{where}: gaps")


def _refuse_impossible(result: PromptResult, where: str) -> None:
    """Counts of which no steps are told can still not be just any."""
    if len(result.proposed) != len(result.accepted):
        raise InputError(
            f"`proposed` has {len(result.proposed)} positions and `accepted` {len(result.accepted)}", where=where
        )
    before = (result.num_drafts, *result.accepted)
    if any(a > min(p, b) for p, a, b in zip(result.proposed, result.accepted, before, strict=False)):
        raise InputError("more drafts kept a token than had it, or than kept the one before", where=where)


def _trimmed(values: tuple[int, ...]) -> tuple[int, ...]:
    """Without the positions at the end that nothing reached: they may be listed as zeros or left out."""
    return values[: max((i + 1 for i, value in enumerate(values) if value), default=0)]


def _step(data: object, where: str) -> Step:
    if not isinstance(data, Sequence) or len(data) != 2 or isinstance(data, str):
        raise InputError("expected drafted ids and the number accepted", where=where)
    pair = {"drafted": data[0], "accepted": data[1]}
    drafted = tuple(_whole(item, place, least=UNTOLD) for item, place in _items(pair, "drafted", where))
    accepted = _integer(pair, "accepted", where)
    if accepted > len(drafted):
        raise InputError(f"{accepted} of {len(drafted)} drafted tokens cannot be accepted", where=where)
    return drafted, accepted


def _baseline(data: object, where: str) -> Baseline:
    found = _object(data, where)
    return Baseline(
        str(_get(found, "name", where)), tuple(_counts(item, place) for item, place in _items(found, "results", where))
    )


def _counts(data: object, where: str) -> Counts:
    found = _object(data, where)
    counts = Counts(
        texts=_integer(found, "texts", where),
        tokens=_integer(found, "tokens", where),
        steps=_integer(found, "steps", where),
        num_drafts=_integer(found, "num_drafts", where),
        proposed=_integers(found, "proposed", where),
        reached=_integers(found, "reached", where),
        accepted=_integers(found, "accepted", where),
    )
    if not len(counts.proposed) == len(counts.reached) == len(counts.accepted):
        raise InputError("`proposed`, `reached` and `accepted` differ in length", where=where)
    return counts


def _gaps(data: Mapping[str, Any], where: str) -> tuple[float, ...]:
    # JSON has no word for infinity; it was written as null.
    return tuple(math.inf if gap is None else _real(gap, place) for gap, place in _items(data, "gaps", where))


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InputError(f"expected an object and found `{type(value).__name__}`", where=where)
    return value


def _get(data: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise InputError(f"expected `{key}` and found none", where=where)
    return data[key]


def _items(data: Mapping[str, Any], key: str, where: str, default: object = None) -> list[tuple[Any, str]]:
    value = data.get(key, default) if default is not None else _get(data, key, where)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise InputError(f"expected a list and found `{type(value).__name__}`", where=f"{where}: {key}")
    return [(item, f"{where}: {key}[{i}]") for i, item in enumerate(value)]


def _integer(data: Mapping[str, Any], key: str, where: str, least: int = 0) -> int:
    return _whole(_get(data, key, where), f"{where}: {key}", least)


def _integers(data: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    return tuple(_whole(item, place) for item, place in _items(data, key, where))


def _number(data: Mapping[str, Any], key: str, where: str) -> float:
    return _real(_get(data, key, where), f"{where}: {key}")


def _whole(value: object, where: str, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"expected an integer of at least {least} and found {value!r}", where=where)
    return value


def _real(value: object, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise InputError(f"expected a number of at least 0 and found {value!r}", where=where)
    return float(value)

"""JSON objects in files that others wrote, and lines of our own. Knows JSON, not what stands in it."""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeAlias

from specctl.errors import InputError
from specctl.files.regular import open_regular, shown, size_of, unreadable

_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")


MAX_TWICE: Final = 100
"""Doubled keys that are reported; a file has one or two of them, or was made to have many."""

_Place: TypeAlias = "tuple[_Place, object] | None"


class _Doubled(dict[str, Any]):
    """An object in which some keys stand twice; the last of each was kept."""

    twice: tuple[str, ...] = ()


def read_json(path: Path, limit_bytes: int = 16 << 20) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The object in a file, and the dotted names of keys that stand twice in one object (the last counts).

    NaN and Infinity are read as such. Raises InputError when the file is missing, too large, no UTF-8,
    begins with a byte order mark (Python's and transformers' readers refuse one), no JSON, or no object.
    """
    text = _text(path, limit_bytes)
    try:
        data = json.loads(text, object_pairs_hook=_object)
        if _HALF_PAIR.search(text):
            # The escape of half a surrogate pair parses, and can be neither shown nor written afterwards.
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError("the text holds half a surrogate pair, which is no Unicode", where=shown(str(path))) from None
    except RecursionError:
        raise InputError("the JSON is nested too deeply", where=shown(str(path))) from None
    except ValueError as error:
        raise InputError(f"expected JSON: {shown(str(error))}", where=shown(str(path))) from None
    if not isinstance(data, dict):
        raise InputError(f"expected a JSON object and found {_kind(data)}", where=shown(str(path)))
    return data, tuple(sorted(set(islice(_twice(data), MAX_TWICE))))


def _text(path: Path, limit_bytes: int) -> str:
    with open_regular(path) as file:
        try:
            size = size_of(file)
            raw = file.read(limit_bytes) if size <= limit_bytes else b""
        except OSError as error:
            raise unreadable(path, error) from None
    if size > limit_bytes:
        raise InputError(f"the file has {size} bytes; at most {limit_bytes} are read", where=shown(str(path)))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected UTF-8 text: byte {error.start} is {raw[error.start]:#04x}", where=shown(str(path))
        ) from None
    if text.startswith("\ufeff"):
        raise InputError("the file begins with a byte order mark, which JSON readers refuse", where=shown(str(path)))
    return text


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    doubled = _Doubled(found)
    doubled.twice = tuple(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    return doubled


def _twice(data: dict[str, Any]) -> Iterator[str]:
    """Walks with a list of its own: what parsed at some depth must not fail here.

    Names are put together only for what is reported; the prefixes of all would be gigabytes for a hostile file.
    """
    waiting: list[tuple[_Place, Any]] = [(None, data)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, _Doubled):
            yield from (_dotted((place, name)) for name in value.twice)
        waiting += [((place, key), inner) for key, inner in _inside(value) if isinstance(inner, dict | list)]


def _dotted(place: "_Place") -> str:
    parts = []
    while place is not None:
        place, key = place
        parts.append(shown(str(key)))
    return ".".join(reversed(parts))


def _inside(value: Any) -> Iterable[tuple[object, Any]]:
    return value.items() if isinstance(value, dict) else enumerate(value)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}.get(type(value), "a number")


def to_json(value: Any) -> str:
    """One line of JSON. A number that is not finite becomes null: JSON has no other word for it."""
    return json.dumps(_finite(value), ensure_ascii=False, default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _finite(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value

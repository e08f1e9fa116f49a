"""The names that a pickle of `torch.save` may hold, and what calling them would describe. Calls nothing.

Source: `torch/_utils.py` (`_rebuild_*`), `torch/serialization.py` (`persistent_id`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_DIMS: Final = 64
MAX_NUMBER: Final = 2**63 - 1

DTYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "complex128": "",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}
"""Dtype codes by torch's names; empty where safetensors has none."""

STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "ComplexDoubleStorage": "",
    "UntypedStorage": "U8",
}

_REBUILT: Final = frozenset(f"torch._utils _rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
_PARAMETERS: Final = frozenset(f"torch._utils _rebuild_parameter{more}" for more in ("", "_with_state"))
_PLAIN: Final = ("set", "bytearray", "complex")
_USELESS: Final = frozenset(("torch device", "torch.serialization _get_layout", "_codecs encode")).union(
    ("collections Counter",), (f"{module} {name}" for module in ("builtins", "__builtin__") for name in _PLAIN)
)
"""Harmless, and of no use here. Source: `_get_allowed_globals` of torch 2.13."""
NAMES: Final = (
    frozenset(f"torch {name}" for name in (*DTYPES, *STORAGES, "Size"))
    | frozenset(("torch.storage UntypedStorage", "collections OrderedDict"))
    | (_REBUILT | _PARAMETERS | _USELESS)
)
"""Every global that may stand in the file, as `module name`."""


@dataclass(frozen=True, slots=True)
class Name:
    """A global that the pickle names, as `module name`."""

    text: str


@dataclass(frozen=True, slots=True)
class Storage:
    """The record `data/<key>` of the archive, with the dtype code of its elements."""

    dtype: str
    key: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor: `shape` and `strides` in elements, from element `offset` of its storage on."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Opaque:
    """A value that is known to be harmless and of no use here."""


OPAQUE: Final = Opaque()


def called(function: Name, arguments: tuple[Any, ...]) -> Any:
    """What the call would give, described. Raises ValueError for arguments that torch does not write."""
    if function.text in _REBUILT:
        return _tensor(function.text, arguments)
    if function.text in _PARAMETERS:
        if not arguments or not isinstance(arguments[0], Stored):
            raise ValueError("a parameter is made of something that is no tensor")
        return arguments[0]
    if function.text == "collections OrderedDict":
        return _ordered_dict(arguments)
    if function.text == "torch Size":
        (sizes,) = arguments
        return _sizes(sizes)
    if function.text in _USELESS:
        return OPAQUE
    raise ValueError(f"`{function.text}` is called")


def storage(persistent_id: Any) -> Storage:
    """The storage that a persistent id names. Raises ValueError when it names anything else."""
    if not isinstance(persistent_id, tuple) or len(persistent_id) != 5 or persistent_id[0] != "storage":
        raise ValueError("a persistent id names something other than a storage")
    _, kind, key, _, count = persistent_id
    name = kind.text.split(" ")[1] if isinstance(kind, Name) else ""
    if name not in STORAGES or not _is_size(count):
        raise ValueError("a persistent id names a storage of no known type or size")
    # Only digits: the key becomes part of a record's name.
    if not isinstance(key, str) or not (key.isascii() and key.isdigit()) or len(key) > 20:
        raise ValueError("a persistent id has a storage key that is no number")
    return Storage(STORAGES[name], key)


def _tensor(name: str, arguments: tuple[Any, ...]) -> Stored:
    if not 4 <= len(arguments) <= 8 or not isinstance(arguments[0], Storage) or not _is_size(arguments[1]):
        raise ValueError("a tensor is made of something that is no storage and offset")
    shape, strides = _sizes(arguments[2]), _sizes(arguments[3])
    if len(shape) != len(strides):
        raise ValueError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
    dtype = arguments[0].dtype
    if name.endswith("_v3"):
        kind = arguments[6] if len(arguments) > 6 else None
        text = kind.text.removeprefix("torch ") if isinstance(kind, Name) else ""
        if text not in DTYPES:
            raise ValueError("a tensor has a dtype that is none")
        dtype = DTYPES[text]
    return Stored(arguments[0], dtype, arguments[1], shape, strides)


def _ordered_dict(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if arguments:
        raise ValueError("an OrderedDict is made of something; torch fills it afterwards")
    return {}


def _sizes(values: Any) -> tuple[int, ...]:
    # Length first: a tuple of a million, named a million times, would take for ever to look at.
    if not isinstance(values, tuple) or len(values) > MAX_DIMS or not all(_is_size(value) for value in values):
        raise ValueError(f"a shape is no tuple of up to {MAX_DIMS} whole numbers")
    return values


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER

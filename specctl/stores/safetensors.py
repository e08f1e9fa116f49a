"""Shards as safetensors files: mapped on read, written slot by slot, also by several processes.

The header is laid down by hand because the library writes a file whole, from copies, in one process;
the result is plain safetensors (a test reads it with the library). Source: the format's README.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specctl.errors import InputError, ShardError
from specctl.files import safetensors as files
from specctl.files.durable import sync_file
from specctl.files.tensors import TensorEntry
from specctl.records.shard import NUMPY_DTYPE, ShardEntry, ShardLayout, SlotArray

SUFFIX: Final = ".safetensors"
COMPRESSIONS: Final = ("none",)
IS_RANDOM_ACCESS: Final = True

_CODES: Final[Mapping[str, tuple[str, Any]]] = {
    "bfloat16": ("BF16", np.uint16),
    "float16": ("F16", np.float16),
    "float32": ("F32", np.float32),
    "int64": ("I64", np.int64),
    "int32": ("I32", np.int32),
    "uint8": ("U8", np.uint8),
}
_BY_CODE: Final = dict(_CODES.values())


def write(path: Path, layout: ShardLayout, small: Mapping[str, SlotArray], slots: Mapping[str, SlotArray]) -> None:
    """Write a whole shard to `path` and sync it. Raises OSError."""
    create(path, layout, small)
    for slot, states in slots.items():
        write_slot(path, slot, states)
    sync_file(path)


def create(path: Path, layout: ShardLayout, small: Mapping[str, SlotArray]) -> None:
    """Lay the file down in full size with its header and small arrays, the slots still to come.

    Space is reserved at once, so that a full disk shows here and not in the middle of a slot.
    """
    header, starts, end = _header(layout, small)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _pwrite(descriptor, header, 0)
        os.posix_fallocate(descriptor, 0, end)
        for name, array in small.items():
            _pwrite(descriptor, np.ascontiguousarray(array).data, starts[name])
    finally:
        os.close(descriptor)


def write_slot(path: Path, slot: str, states: SlotArray) -> None:
    """Write one slot's [T, D] into the file that `create` laid down."""
    entry = read_header(path)[0][f"hidden.{slot}"]
    assert states.nbytes == entry.nbytes, (slot, states.shape)
    descriptor = os.open(path, os.O_RDWR)
    try:
        _pwrite(descriptor, np.ascontiguousarray(states).data, entry.begin)
    finally:
        os.close(descriptor)
    sync_file(path)


def read_header(path: Path, expected_bytes: int | None = None) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The arrays by name, and the metadata. Raises ShardError when the file is cut or damaged.

    Found by structure and size, never by a library's error text, which is no API
    (Comfy-Org/ComfyUI#15602).
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardError("the shard is missing", where=str(path), hint=_REDO) from None
    if expected_bytes is not None and size != expected_bytes:
        raise ShardError(f"the shard has {size} bytes; {expected_bytes} were written", where=str(path), hint=_REDO)
    try:
        return files.read_header(path)
    except InputError as error:
        raise _damaged(path, error.message) from None


class Reader:
    """One mapped shard. Arrays are read-only views of the file; only what is touched is read."""

    def __init__(self, path: Path, entry: ShardEntry | None = None) -> None:
        self._path = path
        self._arrays, metadata = read_header(path, entry.bytes if entry else None)
        self._map = np.memmap(path, np.uint8, mode="r")
        try:
            self.layout = ShardLayout(**_layout_fields(metadata["specctl"]))
            _require_arrays(self._arrays, self.layout)
            _require_offsets(self.offsets(), self.layout)
            ids = self._array("sample_ids")
            self.sample_ids: Sequence[str] = [bytes(row).rstrip(b"\0").decode() for row in ids]
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"it is not what a shard of specctl holds: {error}") from None

    def offsets(self) -> NDArray[np.int64]:
        return self._array("offsets")

    def input_ids(self) -> NDArray[np.int32]:
        return self._array("input_ids")

    def loss_mask(self) -> NDArray[np.uint8]:
        return self._array("loss_mask")

    def slot(self, slot: str, rows: slice | None = None) -> SlotArray:
        if slot not in self.layout.slots:
            raise ShardError(
                f"the shard has no slot `{slot}`; it has {', '.join(self.layout.slots)}", where=str(self._path)
            )
        states = self._array(f"hidden.{slot}")
        return states if rows is None else states[rows]

    def _array(self, name: str) -> NDArray[Any]:
        entry = self._arrays[name]
        raw = self._map[entry.begin : entry.begin + entry.nbytes]
        values: NDArray[Any] = raw.view(_BY_CODE[entry.dtype]).reshape(entry.shape)
        return values


def open_shard(path: Path, entry: ShardEntry | None = None) -> Reader:
    """Open and map a shard; its size is checked against `entry`. Raises ShardError."""
    return Reader(path, entry)


_REDO: Final = "delete this file and run the same `specctl extract` again; it makes only what is missing"


def _damaged(path: Path, what: str) -> ShardError:
    return ShardError(f"the shard is damaged or cut: {what}", where=str(path), hint=_REDO)


def _require_arrays(arrays: Mapping[str, TensorEntry], layout: ShardLayout) -> None:
    """Raises ValueError unless the header describes exactly the arrays that `layout` asks for."""
    width = arrays["sample_ids"].shape[-1]
    wanted = {
        "offsets": ("int64", [layout.num_samples + 1]),
        "input_ids": ("int32", [layout.num_tokens]),
        "loss_mask": ("uint8", [layout.num_tokens]),
        "sample_ids": ("uint8", [layout.num_samples, width]),
    }
    wanted |= {f"hidden.{s}": (layout.dtype, [layout.num_tokens, layout.hidden_size]) for s in layout.slots}
    found = {name: (entry.dtype, list(entry.shape)) for name, entry in arrays.items()}
    for name in sorted(wanted.keys() | found.keys()):
        expected = (_CODES[wanted[name][0]][0], wanted[name][1]) if name in wanted else None
        if found.get(name) != expected:
            raise ValueError(f"`{name}` is {found.get(name, 'missing')}; its metadata says {expected or 'nothing'}")


def _require_offsets(offsets: NDArray[np.int64], layout: ShardLayout) -> None:
    if offsets[0] != 0 or offsets[-1] != layout.num_tokens or (np.diff(offsets) < 0).any():
        raise ValueError(f"its offsets do not cut {layout.num_tokens} tokens into samples")


def _layout_fields(text: str) -> dict[str, Any]:
    fields = json.loads(text)
    fields["slots"] = tuple(fields["slots"])
    return dict(fields)


def _header(layout: ShardLayout, small: Mapping[str, SlotArray]) -> tuple[bytes, dict[str, int], int]:
    """The header's bytes, where each array starts in the file, and the file's size.

    Wider dtypes first, so that every array is aligned without holes.
    """
    shapes = {name: (str(a.dtype), a.shape) for name, a in small.items()}
    for slot in layout.slots:
        shapes[f"hidden.{slot}"] = (layout.dtype, (layout.num_tokens, layout.hidden_size))
    order = sorted(shapes, key=lambda name: -np.dtype(_CODES[shapes[name][0]][1]).itemsize)
    # `__metadata__` maps strings to strings by the format's rule.
    fields = {k: getattr(layout, k) for k in layout.__dataclass_fields__}
    info: dict[str, Any] = {"__metadata__": {"specctl": json.dumps(fields, sort_keys=True)}}
    position = 0
    begins = {}
    for name in order:
        kind, shape = shapes[name]
        code, dtype = _CODES[kind]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        info[name] = {"dtype": code, "shape": list(shape), "data_offsets": [position, position + size]}
        begins[name] = position
        position += size
    text = json.dumps(info, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {n: start + b for n, b in begins.items()}, start + position


def _pwrite(descriptor: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view[: 1 << 30], position)
        view, position = view[written:], position + written


assert {k: v[1] for k, v in _CODES.items() if k in NUMPY_DTYPE} == dict(NUMPY_DTYPE)

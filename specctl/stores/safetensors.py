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

from specctl.errors import ShardError
from specctl.records.shard import NUMPY_DTYPE, ShardEntry, ShardLayout, SlotArray

SUFFIX: Final = ".safetensors"
COMPRESSIONS: Final = ("none",)
IS_RANDOM_ACCESS: Final = True

MAX_HEADER_BYTES: Final = 100_000_000
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
    sync(path)


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
    info, data_start = read_header(path)
    begin, end = info[f"hidden.{slot}"]["data_offsets"]
    assert states.nbytes == end - begin, (slot, states.shape)
    descriptor = os.open(path, os.O_RDWR)
    try:
        _pwrite(descriptor, np.ascontiguousarray(states).data, data_start + begin)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Force the file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path, expected_bytes: int | None = None) -> tuple[dict[str, Any], int]:
    """The tensors' entries and where data begins. Raises ShardError when the file is cut or damaged.

    Found by structure and size, never by a library's error text, which is no API
    (Comfy-Org/ComfyUI#15602).
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardError("the shard is missing", where=str(path), hint=_REDO) from None
    if expected_bytes is not None and size != expected_bytes:
        raise ShardError(f"the shard has {size} bytes; {expected_bytes} were written", where=str(path), hint=_REDO)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise _damaged(path, f"its header would have {length} bytes of {size}")
        raw = file.read(length)
    try:
        info = json.loads(raw)
        end = _contiguous_end(info)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _damaged(path, "its header is no JSON of safetensors") from None
    if 8 + length + end != size:
        raise _damaged(path, f"its header describes {8 + length + end} bytes and the file has {size}")
    return info, 8 + length


class Reader:
    """One mapped shard. Arrays are read-only views of the file; only what is touched is read."""

    def __init__(self, path: Path, entry: ShardEntry | None = None) -> None:
        self._path = path
        self._info, self._start = read_header(path, entry.bytes if entry else None)
        self._map = np.memmap(path, np.uint8, mode="r")
        try:
            self.layout = ShardLayout(**_layout_fields(self._info["__metadata__"]["specctl"]))
            _require_arrays(self._info, self.layout)
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
        entry = self._info[name]
        begin, end = entry["data_offsets"]
        raw = self._map[self._start + begin : self._start + end]
        values: NDArray[Any] = raw.view(_BY_CODE[entry["dtype"]]).reshape(entry["shape"])
        return values


def open_shard(path: Path, entry: ShardEntry | None = None) -> Reader:
    """Open and map a shard; its size is checked against `entry`. Raises ShardError."""
    return Reader(path, entry)


_REDO: Final = "delete this file and run the same `specctl extract` again; it makes only what is missing"


def _damaged(path: Path, what: str) -> ShardError:
    return ShardError(f"the shard is damaged or cut: {what}", where=str(path), hint=_REDO)


def _contiguous_end(info: Mapping[str, Any]) -> int:
    """Where data ends: the arrays fill it in some order without hole or overlap, by the format's rule.

    Raises ValueError, LookupError, TypeError or AttributeError for entries that are none.
    """
    position = 0
    arrays = [entry for name, entry in info.items() if name != "__metadata__"]
    for entry in sorted(arrays, key=lambda entry: tuple(entry["data_offsets"])):
        begin, end = entry["data_offsets"]
        size = math.prod(entry["shape"]) * np.dtype(_BY_CODE[entry["dtype"]]).itemsize
        is_whole = all(type(number) is int and number >= 0 for number in (begin, end, *entry["shape"]))
        if not is_whole or begin != position or end - begin != size:
            raise ValueError(f"shape {entry['shape']} cannot fill bytes {begin}..{end}")
        position = end
    return position


def _require_arrays(info: Mapping[str, Any], layout: ShardLayout) -> None:
    """Raises ValueError unless the header describes exactly the arrays that `layout` asks for."""
    width = info["sample_ids"]["shape"][-1]
    wanted = {
        "offsets": ("int64", [layout.num_samples + 1]),
        "input_ids": ("int32", [layout.num_tokens]),
        "loss_mask": ("uint8", [layout.num_tokens]),
        "sample_ids": ("uint8", [layout.num_samples, width]),
    }
    wanted |= {f"hidden.{s}": (layout.dtype, [layout.num_tokens, layout.hidden_size]) for s in layout.slots}
    found = {name: (entry["dtype"], entry["shape"]) for name, entry in info.items() if name != "__metadata__"}
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

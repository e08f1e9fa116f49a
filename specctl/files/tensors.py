"""Tensors that lie in files: what they are, their bytes in pieces, their numbers. Knows no container.

Nothing here is read before it is asked for, and never more of it at once than the caller allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias

from specctl.errors import InputError
from specctl.files.regular import open_regular, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
        **dict.fromkeys(("F32", "U32", "I32"), 4),
        **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
        **dict.fromkeys(("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
    }
)
"""Bytes per element by dtype code, in the order in which the safetensors library lays tensors down."""

FLOATS: Final = frozenset(c for c in ITEM_BYTES if c.startswith(("F", "BF")))
INTEGERS: Final = frozenset(c for c in ITEM_BYTES if c.startswith(("I", "U")))

_NUMPY: Final = {"C64": "<c8", "F64": "<f8", "F32": "<f4", "F16": "<f2"} | {
    code: f"<{code[0].lower()}{ITEM_BYTES[code]}" for code in INTEGERS
}
_ROW_LIMIT: Final = 256 << 20
_PIECE: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that lies in a file, row-major, `nbytes` from the absolute offset `begin` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """A small tensor in memory, row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        assert len(self.data) == math.prod(self.shape) * ITEM_BYTES[self.dtype], (self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows (`axis` 0) or columns (1) of a 2-D entry in another order, in blocks of `block`.

    `order[i]` is the old place of the block that comes to stand at i. `shape` is the shape it is written in,
    the entry's own when empty. Raises InputError unless `order` is a permutation of all blocks.
    """

    entry: TensorEntry
    axis: int
    order: tuple[int, ...]
    block: int = 1
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        shape = self.entry.shape
        object.__setattr__(self, "shape", self.shape or shape)
        assert math.prod(self.shape) == math.prod(shape), self.shape
        if len(shape) != 2 or self.axis not in (0, 1) or self.block < 1 or shape[self.axis] % self.block:
            raise InputError(
                f"`{shown(self.entry.name)}` of shape {list(shape)} has no blocks of {self.block} "
                f"along axis {self.axis}",
                where=shown(str(self.entry.path)),
            )
        if sorted(self.order) != list(range(shape[self.axis] // self.block)):
            raise InputError(
                f"the new order of `{shown(self.entry.name)}` is no permutation of its "
                f"{shape[self.axis] // self.block} blocks",
                where=shown(str(self.entry.path)),
            )

    @property
    def dtype(self) -> str:
        return self.entry.dtype

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes


Source: TypeAlias = TensorEntry | Table | Gather


def chunks(source: Source, size: int = 8 << 20) -> Iterator[bytes | memoryview]:
    """The bytes of a tensor in order, in pieces of at most about `size`.

    Raises InputError when the file has become shorter or cannot be read any more.
    """
    if isinstance(source, Table):
        yield from (memoryview(source.data)[at : at + size] for at in range(0, source.nbytes, size))
        return
    entry = source.entry if isinstance(source, Gather) else source
    if not entry.nbytes:
        return
    with open_regular(entry.path) as file:
        spans = _row_batches(source, size) if isinstance(source, Gather) else iter([(0, entry.nbytes, 0)])
        for offset, length, rows in spans:
            for at in range(0, length, size):
                data = _read(file, entry, offset + at, min(size, length - at))
                yield _reordered(data, source, rows) if rows and isinstance(source, Gather) else data


def _row_batches(source: Gather, size: int) -> Iterator[tuple[int, int, int]]:
    """What to read, as (offset, bytes, rows): whole rows to be reordered in memory, or with 0 rows a span as is."""
    num_rows = 1 if source.axis == 0 else source.entry.shape[0]
    row_bytes = source.nbytes // num_rows
    block_bytes = row_bytes // len(source.order)
    if source.axis == 1 and row_bytes <= size:
        at_once = size // row_bytes
        for row in range(0, num_rows, at_once):
            rows = min(at_once, num_rows - row)
            yield row * row_bytes, rows * row_bytes, rows
        return
    for row in range(num_rows):
        for first, count in _runs(source.order):
            yield row * row_bytes + first * block_bytes, count * block_bytes, 0


def _runs(order: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Neighbours that stay neighbours, as (first, count): one read instead of many."""
    first, count = order[0], 0
    for place in order:
        if place != first + count:
            yield first, count
            first, count = place, 0
        count += 1
    yield first, count


def _reordered(data: bytes, source: Gather, rows: int) -> bytes:
    import numpy as np

    blocks = np.frombuffer(data, np.uint8).reshape(rows, len(source.order), -1)
    return blocks[:, list(source.order)].tobytes()


def _read(file: BinaryIO, entry: TensorEntry, offset: int, length: int) -> bytes:
    try:
        file.seek(entry.begin + offset)
        data = file.read(length)
    except OSError as error:
        raise InputError(
            f"`{shown(entry.name)}` cannot be read: {error.strerror}", where=shown(str(entry.path))
        ) from None
    if len(data) != length:
        raise InputError(
            f"the file has become shorter: `{shown(entry.name)}` has {offset + len(data)} bytes of {entry.nbytes}",
            where=shown(str(entry.path)),
        )
    return data


def read_array(source: Source, limit_bytes: int = 64 << 20) -> NDArray[Any]:
    """The numbers of a tensor in its shape: BF16 and F8 as float32, BOOL as bool, others as they are.

    Raises InputError when it has more than `limit_bytes` or a shape that numpy cannot hold.
    """
    name = "the tensor" if isinstance(source, Table) else f"`{shown(_entry_of(source).name)}`"
    where = None if isinstance(source, Table) else shown(str(_entry_of(source).path))
    if source.nbytes > limit_bytes:
        raise InputError(f"{name} has {source.nbytes} bytes; at most {limit_bytes} are read here", where=where)
    try:
        return decode(b"".join(chunks(source)), source.dtype).reshape(source.shape)
    except ValueError:
        raise InputError(f"{name} has a shape that cannot be read: {list(source.shape)}", where=where) from None


def _entry_of(source: TensorEntry | Gather) -> TensorEntry:
    return source.entry if isinstance(source, Gather) else source


def float_chunks(entry: TensorEntry, rows: int) -> Iterator[tuple[int, NDArray[np.floating[Any]]]]:
    """A float tensor as (first row, [at most `rows`, rest]) pieces: float32, or float64 for F64.

    A scalar is one row. Fewer rows come at once when `rows` of them would be more than 32 MiB.
    Raises InputError for another dtype, a row above 256 MiB, or a file that has become shorter.
    """
    if entry.dtype not in FLOATS:
        raise InputError(
            f"`{shown(entry.name)}` has dtype {entry.dtype}; expected floats", where=shown(str(entry.path))
        )
    if not entry.nbytes:
        return
    shape = entry.shape or (1,)
    row_bytes = entry.nbytes // shape[0]
    if row_bytes > _ROW_LIMIT:
        raise InputError(
            f"a row of `{shown(entry.name)}` has {row_bytes} bytes; at most {_ROW_LIMIT} are read",
            where=shown(str(entry.path)),
        )
    at_once = max(1, min(rows, _PIECE // row_bytes))
    with open_regular(entry.path) as file:
        for row in range(0, shape[0], at_once):
            count = min(at_once, shape[0] - row)
            values = decode(_read(file, entry, row * row_bytes, count * row_bytes), entry.dtype)
            yield row, _as_floats(values, entry.dtype).reshape(count, *shape[1:])


def _as_floats(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    return values.astype("float32") if dtype == "F16" else values


def decode(data: bytes, dtype: str) -> NDArray[Any]:
    """Raw little-endian elements as a flat array; BF16 and F8 exactly, in float32."""
    import numpy as np

    if dtype in _NUMPY:
        return np.frombuffer(data, _NUMPY[dtype])
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "BOOL":
        # A byte other than 0 and 1 would be a bool of which numpy makes anything.
        return np.frombuffer(data, np.uint8).astype(np.bool_)
    values: NDArray[Any] = _float8_values(dtype)[np.frombuffer(data, np.uint8)]
    return values


def _float8_values(dtype: str) -> NDArray[Any]:
    """The 256 values of an 8-bit float, float32. Source: arXiv 2209.05433; OCP MX 1.0; torch's fnuz types."""
    import numpy as np

    codes = np.arange(256)
    if dtype == "F8_E8M0":
        scales: NDArray[Any] = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
        return scales
    mantissa_bits = 3 if "E4M3" in dtype else 2
    is_fnuz = dtype.endswith("FNUZ")
    bias = (1 << (6 - mantissa_bits)) - 1 + is_fnuz
    exponent, mantissa = (codes & 127) >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    whole = mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)
    values = np.ldexp(whole.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    if dtype == "F8_E4M3":
        values[codes & 127 == 127] = np.nan
    elif dtype == "F8_E5M2":
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    values = np.where(codes > 127, -values, values)
    if is_fnuz:
        values[128] = np.nan
    table: NDArray[Any] = values.astype(np.float32)
    return table

"""Shards as Parquet files: one row per sample, one column per slot, readable by any Parquet reader.

16-bit states are stored as their bits in uint16 columns (Arrow has no bfloat16, and DuckDB cannot read
byte-stream-split float16); a field's metadata states the dtype. List offsets are 64-bit and row groups
bounded, so no column ever passes 2^31 values in one piece (apache/arrow#43185).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from specctl.errors import ShardError
from specctl.files.durable import sync_file
from specctl.records.shard import NUMPY_DTYPE, ShardEntry, ShardLayout, SlotArray

SUFFIX: Final = ".parquet"
COMPRESSIONS: Final = ("zstd", "none")
IS_RANDOM_ACCESS: Final = False

ZSTD_LEVEL: Final = 1
ROW_GROUP_BYTES: Final = 4 << 20
"""Bytes of one slot in one row group: what a reader decodes to read a sample."""

_STORED: Final = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.float32}
_REDO: Final = "delete this file and run the same `specctl extract` again; it makes only what is missing"


def write(path: Path, layout: ShardLayout, small: Mapping[str, SlotArray], slots: Mapping[str, SlotArray]) -> None:
    """Write a whole shard to `path` and sync it. Raises OSError."""
    schema = _schema(layout)
    states = [f"hidden.{slot}.list.element" for slot in layout.slots]
    is_zstd = layout.compression == "zstd"
    writer = pq.ParquetWriter(
        path,
        schema,
        compression="zstd" if is_zstd else "none",
        compression_level=ZSTD_LEVEL if is_zstd else None,
        use_dictionary=False,
        write_statistics=False,
        use_byte_stream_split=states if is_zstd else False,
    )
    with writer:
        for first, end in row_groups(small["offsets"], layout):
            writer.write_table(_table(first, end, layout, small, slots, schema), row_group_size=end - first)
    sync_file(path)


def row_groups(offsets: NDArray[np.int64], layout: ShardLayout) -> Iterator[tuple[int, int]]:
    """Sample ranges [first, end) whose slots stay within ROW_GROUP_BYTES, one sample at least."""
    row_bytes = layout.hidden_size * np.dtype(_STORED[layout.dtype]).itemsize
    most = max(1, ROW_GROUP_BYTES // row_bytes)
    first = 0
    while first < layout.num_samples:
        end = int(np.searchsorted(offsets, offsets[first] + most, side="right")) - 1
        end = min(max(end, first + 1), layout.num_samples)
        yield first, end
        first = end


class Reader:
    """One open Parquet shard."""

    def __init__(self, path: Path, entry: ShardEntry | None = None) -> None:
        self._path = path
        if not path.is_file():
            raise ShardError("the shard is missing", where=str(path), hint=_REDO)
        size = path.stat().st_size
        if entry is not None and size != entry.bytes:
            raise ShardError(f"the shard has {size} bytes; {entry.bytes} were written", where=str(path), hint=_REDO)
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
            fields = json.loads(self._file.schema_arrow.metadata[b"specctl"])
            fields["slots"] = tuple(fields["slots"])
            self.layout = ShardLayout(**fields)
            self.sample_ids: Sequence[str] = self._file.read(["sample_id"])["sample_id"].to_pylist()
            if not self._file.schema_arrow.equals(_schema(self.layout)):
                raise ValueError("its columns are not those that its metadata names")
            if len(self.sample_ids) != self.layout.num_samples:
                raise ValueError(f"it has {len(self.sample_ids)} rows of {self.layout.num_samples}")
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(error) from None

    def offsets(self) -> NDArray[np.int64]:
        lengths = np.zeros(self.layout.num_samples + 1, np.int64)
        np.cumsum([len(ids) for ids in self._column("input_ids")], out=lengths[1:])
        return lengths

    def input_ids(self) -> NDArray[np.int32]:
        return self._flat("input_ids", np.int32, self.layout.num_tokens)

    def loss_mask(self) -> NDArray[np.uint8]:
        return self._flat("loss_mask", np.uint8, self.layout.num_tokens)

    def slot(self, slot: str, rows: slice | None = None) -> SlotArray:
        if slot not in self.layout.slots:
            raise ShardError(
                f"the shard has no slot `{slot}`; it has {', '.join(self.layout.slots)}", where=str(self._path)
            )
        size, bounds = self.layout.hidden_size, self._group_bounds
        begin, end, step = (rows or slice(None)).indices(self.layout.num_tokens)
        assert step == 1, "rows that follow each other"
        # Only the groups that hold a wanted row are decoded.
        first = max(int(np.searchsorted(bounds, begin, side="right")) - 1, 0)
        last = max(int(np.searchsorted(bounds, end, side="left")), first)
        start = int(bounds[first])
        held = int(bounds[last]) - start
        flat = self._flat(f"hidden.{slot}", _STORED[self.layout.dtype], held * size, range(first, last))
        states: SlotArray = flat.view(NUMPY_DTYPE[self.layout.dtype]).reshape(held, size)
        return states[max(begin - start, 0) : max(end - start, 0)]

    @cached_property
    def _group_bounds(self) -> NDArray[np.int64]:
        """The row of the slots with which each row group begins, and their end."""
        counts = [self._file.metadata.row_group(g).num_rows for g in range(self._file.num_row_groups)]
        bounds: NDArray[np.int64] = self.offsets()[np.cumsum([0, *counts])]
        return bounds

    def _flat(self, column: str, dtype: Any, num_values: int, groups: Sequence[int] | None = None) -> NDArray[Any]:
        flat = np.empty(num_values, dtype)
        position = 0
        for chunk in self._chunks(column, groups):
            values = chunk.flatten().to_numpy(zero_copy_only=False)
            flat[position : position + len(values)] = values[: num_values - position]
            position += len(values)
        if position != num_values:
            raise ShardError(
                f"the shard is damaged: `{column}` has {position} values of {num_values}", where=str(self._path)
            )
        return flat

    def _chunks(self, column: str, groups: Sequence[int] | None = None) -> Iterator[Any]:
        try:
            for group in range(self._file.num_row_groups) if groups is None else groups:
                yield from self._file.read_row_group(group, columns=[column])[column].chunks
        except (pa.ArrowException, OSError, KeyError) as error:
            raise self._damaged(error) from None

    def _column(self, column: str) -> Iterator[Any]:
        for chunk in self._chunks(column):
            yield from chunk

    def _damaged(self, error: Exception) -> ShardError:
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ShardError(f"the shard is damaged or cut: {what}", where=str(self._path), hint=_REDO)


def open_shard(path: Path, entry: ShardEntry | None = None) -> Reader:
    """Open a shard; its size is checked against `entry`. Raises ShardError."""
    return Reader(path, entry)


def _list_of(kind: Any) -> Any:
    return pa.large_list(pa.field("element", kind, nullable=False))


def _schema(layout: ShardLayout) -> Any:
    fields = [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("input_ids", _list_of(pa.int32()), nullable=False),
        pa.field("loss_mask", _list_of(pa.uint8()), nullable=False),
    ]
    kind = pa.from_numpy_dtype(np.dtype(_STORED[layout.dtype]))
    meta = {"dtype": layout.dtype, "hidden_size": str(layout.hidden_size)}
    fields += [pa.field(f"hidden.{s}", _list_of(kind), nullable=False, metadata=meta) for s in layout.slots]
    described = {k: getattr(layout, k) for k in layout.__dataclass_fields__}
    return pa.schema(fields, metadata={"specctl": json.dumps(described, sort_keys=True)})


def _table(
    first: int,
    end: int,
    layout: ShardLayout,
    small: Mapping[str, SlotArray],
    slots: Mapping[str, SlotArray],
    schema: Any,
) -> Any:
    offsets = small["offsets"][first : end + 1]
    rows = slice(int(offsets[0]), int(offsets[-1]))
    local = offsets - offsets[0]
    ids = [bytes(row).rstrip(b"\0").decode() for row in small["sample_ids"][first:end]]
    columns = [pa.array(ids, pa.string())]
    columns += [_lists(small[name][rows], local) for name in ("input_ids", "loss_mask")]
    stored = _STORED[layout.dtype]
    for slot in layout.slots:
        flat = np.ascontiguousarray(slots[slot][rows]).reshape(-1).view(stored)
        columns.append(_lists(flat, local * layout.hidden_size))
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(flat: NDArray[Any], offsets: NDArray[np.int64]) -> Any:
    """A large_list array over `flat` without copying it."""
    values = pa.array(flat)
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(_list_of(values.type), len(offsets) - 1, buffers, children=[values])

"""DATA files as raw rows: JSON Lines, JSON arrays, Parquet, standard input.

Knows bytes and places; does not know what a row means.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

from specctl.errors import DataError

STDIN: Final = "-"

_BOM: Final = b"\xef\xbb\xbf"


def check_files(paths: Sequence[str]) -> None:
    """Raises DataError when there are none, one is missing or a folder, or stdin is asked for twice."""
    if not paths:
        raise DataError("no data file is given", hint="pass JSONL or Parquet files, or `-` for standard input")
    if paths.count(STDIN) > 1:
        raise DataError("`-` is given twice; standard input can be read once")
    for path in paths:
        _check_path(path)


def raw_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Place (`file:LINE`) and row: bytes where it is JSON, a dict where it was Parquet.

    Streams; only a JSON array is read whole. Raises DataError for a file that cannot be read.
    """
    if path.endswith(".parquet"):
        return _parquet_rows(path)
    if path.removesuffix(".gz").endswith(".json") and _holds_array(path):
        return _array_rows(path)
    return _lines(path)


def _check_path(path: str) -> None:
    if path == STDIN:
        return
    if Path(path).is_dir():
        raise DataError("this is a folder; a data file is expected", where=path, hint="pass the files in it")
    if not Path(path).exists():
        raise DataError("no such data file", where=path, hint="is the path right?")


def _lines(path: str) -> Iterator[tuple[str, bytes]]:
    name = "stdin" if path == STDIN else path
    with _reading(path) as file:
        # Binary lines end at \n alone; text lines would also end at U+2028.
        for number, line in enumerate(file, 1):
            text = line.removeprefix(_BOM) if number == 1 else line
            if text.strip():
                yield f"{name}:{number}", text


def _holds_array(path: str) -> bool:
    with _reading(path) as file:
        for line in file:
            if text := line.removeprefix(_BOM).strip():
                return text.startswith(b"[")
    return False


def _array_rows(path: str) -> Iterator[tuple[str, Any]]:
    with _reading(path) as file:
        data = file.read().removeprefix(_BOM)
    try:
        rows = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"the file is no JSON array: {error}", where=path, hint="or name it `.jsonl`") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}:{number}", json.dumps(row).encode()


def _parquet_rows(path: str) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", _without_nulls(row)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"the Parquet file cannot be read: {error}", where=path) from error


def _without_nulls(value: Any) -> Any:
    """Parquet fills every key that some other row has with null; a template would see them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _reading(path: str) -> Iterator[IO[bytes]]:
    try:
        with _open(path) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"the data file cannot be read: {error}", where=path) from error


def _open(path: str) -> AbstractContextManager[IO[bytes]]:
    if path == STDIN:
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path) if path.endswith(".gz") else Path(path).open("rb")  # type: ignore[return-value]

"""Tensors in the zip files of `torch.save`, found without unpickling and without torch. Knows no checkpoint.

A record is used only where it lies uncompressed in the archive, so nothing is ever inflated, and its name
is only compared, never made a path.
"""

import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from specctl.errors import InputError, NotSupportedError
from specctl.files.pickled import evaluate
from specctl.files.regular import open_regular, shown, size_of, unreadable
from specctl.files.tensors import ITEM_BYTES, TensorEntry
from specctl.files.torchcalls import Stored

MAX_PICKLE_BYTES: Final = 64 << 20
MAX_DIRECTORY_BYTES: Final = 8 << 20
"""Of the zip's own table; 80 000 records. The library reads it whole, whatever size it claims."""

TorchValue: TypeAlias = TensorEntry | int | float | str | bool | None

_AGAIN: Final = "load it with a current torch (`weights_only=True`) and save it again"
_LOCAL: Final = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class _Archive:
    path: Path
    file: BinaryIO
    size: int
    root: str
    records: Mapping[str, zipfile.ZipInfo]

    def span(self, name: str) -> tuple[int, int]:
        """Where a record's bytes begin in the file, and how many they are. Raises InputError."""
        record = self.records.get(f"{self.root}/{name}")
        if record is None:
            raise _broken(f"the archive holds no record `{shown(name)}`", self.path)
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1:
            raise _broken(f"the record `{shown(name)}` is compressed or encrypted; torch stores it plainly", self.path)
        begin = self._data_begin(record)
        if record.file_size != record.compress_size or begin + record.file_size > self.size:
            raise _broken(f"the record `{shown(name)}` of {record.file_size} bytes is cut", self.path)
        return begin, record.file_size

    def _data_begin(self, record: zipfile.ZipInfo) -> int:
        """The local header may be padded otherwise than the table says: torch aligns records so."""
        if not 0 <= record.header_offset <= self.size - _LOCAL.size:
            raise _broken("a record lies outside the file", self.path)
        self.file.seek(record.header_offset)
        magic, name_bytes, extra_bytes = _LOCAL.unpack(self.file.read(_LOCAL.size))
        if magic != b"PK\x03\x04":
            raise _broken("a record has no header where the archive's table says", self.path)
        return record.header_offset + _LOCAL.size + int(name_bytes) + int(extra_bytes)

    def read(self, name: str, limit: int) -> bytes:
        """The bytes of a small record. Raises InputError."""
        begin, size = self.span(name)
        if size > limit:
            raise _broken(f"the record `{name}` has {size} bytes; at most {limit} are read", self.path)
        self.file.seek(begin)
        return self.file.read(size)


def read_torch(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a state dict by name; one level down in `state_dict` or `model` when none lies on top.

    Values that are no tensors are skipped. Raises UnsafeFile when the pickle names code, InputError when
    the file is no zip of torch, damaged, or of the other byte order, NotSupportedError for the format before
    torch 1.6 and for a tensor that is not contiguous: both are whole, and not read here.
    """
    with open_regular(path) as file:
        archive, values = _load(path, file)
        found = _tensors(values)
        inner = next((values[k] for k in ("state_dict", "model") if isinstance(values.get(k), dict)), None)
        if not found and inner is not None:
            found = _tensors(inner)
        return {name: _entry(name, tensor, archive) for name, tensor in found.items()}


def wrapping_key(path: Path) -> str | None:
    """The key under which the state dict lies one level down; None where the tensors lie on top."""
    with open_regular(path) as file:
        _, values = _load(path, file)
        if _tensors(values):
            return None
        return next((key for key in ("state_dict", "model") if isinstance(values.get(key), dict)), None)


def read_torch_values(path: Path) -> dict[str, TorchValue]:
    """The tensors, numbers, strings, booleans and nulls at the top of a small file; others are skipped.

    Raises as `read_torch`.
    """
    with open_regular(path) as file:
        archive, values = _load(path, file)
        return {
            name: _entry(name, value, archive) if isinstance(value, Stored) else value
            for name, value in values.items()
            if isinstance(name, str) and isinstance(value, Stored | int | float | str | None)
        }


def _broken(what: str, path: Path, hint: str | None = None) -> InputError:
    return InputError(what, where=shown(str(path)), hint=hint)


def _load(path: Path, file: BinaryIO) -> tuple[_Archive, dict[Any, Any]]:
    try:
        archive = _opened(path, file)
        if f"{archive.root}/byteorder" in archive.records:
            order = archive.read("byteorder", 16)
            if order != b"little":
                raise _broken(f"the tensors are stored in byte order `{shown(order.decode('latin-1'))}`", path, _AGAIN)
        data = archive.read("data.pkl", MAX_PICKLE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from None
    values = evaluate(data, f"{shown(str(path))}, data.pkl")
    if not isinstance(values, dict):
        raise _broken("the file holds no dict of tensors", path)
    return archive, values


class _Bounded:
    """The part of a file that `zipfile` uses, which gives out no more at once than a sane table needs."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its table would have {size} bytes; at most {MAX_DIRECTORY_BYTES} are read")
        return self._file.read(size if size >= 0 else MAX_DIRECTORY_BYTES)


def _opened(path: Path, file: BinaryIO) -> _Archive:
    head = file.read(32)
    if not head.startswith(b"PK"):
        _refuse_other(head, path)
    try:
        with zipfile.ZipFile(_Bounded(file)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, LookupError, EOFError) as error:
        raise _broken(f"expected a zip of `torch.save`: {shown(str(error))}", path) from None
    records = {info.filename: info for info in infos}
    if len(records) != len(infos):
        raise _broken("two records of the archive have one name", path)
    roots = [name[: -len("/data.pkl")] for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise _broken(f"expected one `data.pkl` in the archive and found {len(roots)}", path)
    return _Archive(path, file, size_of(file), roots[0], records)


def _refuse_other(head: bytes, path: Path) -> None:
    if head.startswith(b"version https://git-lfs"):
        raise _broken("the file is a Git LFS pointer and not the weights", path, "fetch them with `git lfs pull`")
    if head.startswith(b"\x80"):
        raise NotSupportedError(
            "the file is a bare pickle, as torch wrote before 1.6; specctl reads its zip files only",
            where=shown(str(path)),
            hint=_AGAIN,
        )
    raise _broken("the file is no zip of `torch.save`" if head else "the file is empty", path)


def _tensors(values: Mapping[Any, Any]) -> dict[str, Stored]:
    return {name: value for name, value in values.items() if isinstance(name, str) and isinstance(value, Stored)}


def _entry(name: str, tensor: Stored, archive: _Archive) -> TensorEntry:
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise _broken(f"`{shown(name)}` has a dtype that safetensors does not know", archive.path)
    nbytes = math.prod(tensor.shape) * item
    if nbytes and not _is_contiguous(tensor):
        raise NotSupportedError(
            f"`{shown(name)}` is stored as a view that is not contiguous (shape {list(tensor.shape)}, strides "
            f"{list(tensor.strides)}), which specctl does not read",
            where=shown(str(archive.path)),
            hint="save `tensor.contiguous()` instead",
        )
    begin, size = _span(archive, tensor.storage.key)
    first = tensor.offset * item
    if first + nbytes > size:
        raise _broken(f"`{shown(name)}` needs bytes {first} to {first + nbytes} of a storage of {size}", archive.path)
    return TensorEntry(name, tensor.dtype, tensor.shape, archive.path, begin + first, nbytes)


def _span(archive: _Archive, key: str) -> tuple[int, int]:
    try:
        return archive.span(f"data/{key}")
    except OSError as error:
        raise unreadable(archive.path, error) from None


def _is_contiguous(tensor: Stored) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True

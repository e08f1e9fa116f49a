"""Headers of safetensors files, read with suspicion, and plain files written from any source. Knows no shards.

By hand, because the library's messages are no API, it takes the last of two equal names without a word,
and it writes from whole copies in memory. Source: the format's README.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from specctl.errors import InputError
from specctl.files.regular import open_regular, shown, size_of, unreadable
from specctl.files.tensors import ITEM_BYTES, Gather, Source, TensorEntry, chunks

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own bound."""
MAX_TENSORS: Final = 200_000
"""A header with more marks than these need is not parsed: 100 MB of `[[],[],...` would become gigabytes."""
MAX_DIMS: Final = 64
MAX_NUMBER: Final = 2**63 - 1

_LFS: Final = b"version https://git-lfs"
_ORDER: Final = {code: rank for rank, code in enumerate(ITEM_BYTES)}


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """The tensors of a file by name, in the order of their bytes, and its metadata.

    Reads the header only. Raises InputError, with what was expected and found, unless the file is whole
    and the tensors fill it without hole or overlap.
    """
    with open_regular(path) as file:
        try:
            size = size_of(file)
            raw = _raw_header(file, size, path)
        except OSError as error:
            raise unreadable(path, error) from None
    info = _parse(raw, path)
    metadata = _metadata(info.pop("__metadata__", {}), path)
    start = 8 + len(raw)
    entries = [_entry(name, value, path, start) for name, value in info.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.nbytes))
    _require_contiguous(entries, start, size, path)
    return {entry.name: entry for entry in entries}, metadata


def _refuse(what: str, path: Path, hint: str | None = None) -> NoReturn:
    raise InputError(what, where=shown(str(path)), hint=hint)


def _raw_header(file: BinaryIO, size: int, path: Path) -> bytes:
    head = file.read(len(_LFS))
    if head == _LFS:
        _refuse("the file is a Git LFS pointer and not the weights", path, "fetch them with `git lfs pull`")
    length = int.from_bytes(head[:8], "little") if size >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        _refuse(f"the header would have {length} bytes of {size}; expected 2 to {MAX_HEADER_BYTES}, all present", path)
    if head[8:9] != b"{":
        _refuse("the header is no JSON object: it does not begin with a brace", path)
    file.seek(8)
    raw = file.read(length)
    if len(raw) != length:
        _refuse(f"the header has {len(raw)} bytes of {length}; the file is being cut", path)
    return raw


def _parse(raw: bytes, path: Path) -> dict[str, Any]:
    if any(raw.count(mark) > times * MAX_TENSORS for mark, times in ((b"{", 1), (b"[", 3), (b",", 20))):
        _refuse(f"the header describes more than {MAX_TENSORS} tensors", path)
    try:
        info = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in raw:
            # Half a surrogate pair can be written as an escape, but no name can be stored or shown with it.
            json.dumps(info, ensure_ascii=False).encode()
    except UnicodeError:
        _refuse("the header is no UTF-8 text", path)
    except (ValueError, RecursionError) as error:
        _refuse(f"the header is no JSON of safetensors: {shown(str(error))}", path)
    return dict(info)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"`{shown(twice)}` stands in it twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"`{text}` is no number")


def _metadata(value: Any, path: Path) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _refuse("`__metadata__` in the header is no map from strings to strings", path)
    return dict(value)


def _entry(name: str, value: Any, path: Path, start: int) -> TensorEntry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"`{shown(name)}` needs `dtype`, `shape` and `data_offsets`, and nothing else", path)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _refuse(f"`{shown(name)}` has dtype `{_brief(dtype)}`; known are {', '.join(ITEM_BYTES)}", path)
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        _refuse(f"`{shown(name)}` has shape `{_brief(shape)}`; expected up to {MAX_DIMS} whole numbers", path)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(f"`{shown(name)}` has data_offsets `{_brief(offsets)}`; expected [begin, end]", path)
    begin, end = offsets
    needed = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != needed:
        _refuse(f"`{shown(name)}` has {end - begin} bytes; {dtype} of shape {shape} needs {needed}", path)
    return TensorEntry(name, dtype, tuple(shape), path, start + begin, needed)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= MAX_NUMBER for v in values)


def _brief(value: Any) -> str:
    """A JSON value as an error may name it: foreign, so perhaps huge or nested without end."""
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return shown(str(value[:8]), 80)
    return shown(str(value), 40) if not isinstance(value, list | dict) else f"a {type(value).__name__}"


def _require_contiguous(entries: list[TensorEntry], start: int, size: int, path: Path) -> None:
    position = start
    for entry in entries:
        if entry.begin != position:
            what = "overlaps the one before it" if entry.begin < position else "leaves a hole before it"
            _refuse(f"`{shown(entry.name)}` begins at byte {entry.begin} and not at {position}: it {what}", path)
        position += entry.nbytes
    if position != size:
        _refuse(f"the header describes {position} bytes and the file has {size}", path)


def write(
    path: Path,
    tensors: Mapping[str, Source],
    metadata: Mapping[str, str] | None,
    *,
    advance: Callable[[int], None] | None = None,
) -> None:
    """Write a file that equals the safetensors library's own, byte for byte, and sync it. Metadata is sorted.

    `advance` is told the bytes of each piece of a tensor that was written. Memory stays at a few pieces
    whatever the size. Raises InputError when a source cannot be read, would be overwritten or has a name the
    format keeps; OSError when the disk refuses.
    """
    if "__metadata__" in tensors:
        _refuse("a tensor cannot be named `__metadata__`; the format keeps this name", path)
    _refuse_own_sources(path, tensors)
    order = sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name.encode("utf-8", "surrogatepass")))
    header = _header({name: tensors[name] for name in order}, metadata, path)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            for piece in chunks(tensors[name]):
                file.write(piece)
                if advance is not None:
                    advance(len(piece))
        file.flush()
        os.fsync(file.fileno())


def _refuse_own_sources(path: Path, tensors: Mapping[str, Source]) -> None:
    entries = (source.entry if isinstance(source, Gather) else source for source in tensors.values())
    paths = {entry.path for entry in entries if isinstance(entry, TensorEntry)}
    if path.exists() and any(source.exists() and source.samefile(path) for source in paths):
        _refuse("the file to be written is one that is read", path, "choose another output")


def _header(tensors: Mapping[str, Source], metadata: Mapping[str, str] | None, path: Path) -> bytes:
    info: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata is not None else {}
    position = 0
    for name, source in tensors.items():
        end = position + source.nbytes
        info[name] = {"dtype": source.dtype, "shape": list(source.shape), "data_offsets": [position, end]}
        position = end
    try:
        text = json.dumps(info, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        _refuse("a name or the metadata holds half a surrogate pair, which is no UTF-8", path)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text

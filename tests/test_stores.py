"""The two shard containers: their bytes, what other readers see, and what damage does to them."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import safetensors
import torch
from safetensors.torch import load_file

from specctl import plugins
from specctl.errors import ShardError
from specctl.records.shard import NUMPY_DTYPE, ShardEntry, ShardLayout
from specctl.stores import parquet
from specctl.stores import safetensors as store

LENGTHS = (3, 5, 2, 7)
SLOTS = ("0", "4", "norm")
FORMATS = ("safetensors", "parquet")

Parts = tuple[ShardLayout, dict[str, Any], dict[str, Any]]


def parts(dtype: str = "bfloat16", *, hidden_size: int = 6, lengths: tuple[int, ...] = LENGTHS) -> Parts:
    """A shard's layout, small arrays and states, drawn from a seed."""
    rng = np.random.default_rng(7)
    tokens = sum(lengths)
    values = {s: torch.from_numpy(rng.standard_normal((tokens, hidden_size)).astype(np.float32)) for s in SLOTS}
    names = ["a", "chat-1", "\u00e9t\u00e9", "d" * 20][: len(lengths)] + [f"s{i}" for i in range(4, len(lengths))]
    encoded = [name.encode() for name in names]
    width = max(map(len, encoded))
    small = {
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "input_ids": rng.integers(0, 264, tokens).astype(np.int32),
        "loss_mask": rng.integers(0, 2, tokens).astype(np.uint8),
        "sample_ids": np.frombuffer(b"".join(n.ljust(width, b"\0") for n in encoded), np.uint8).reshape(-1, width),
    }
    states = {slot: to_bits(value.to(getattr(torch, dtype))) for slot, value in values.items()}
    return ShardLayout(len(lengths), tokens, hidden_size, dtype, SLOTS, "none"), small, states


def to_bits(values: torch.Tensor) -> Any:
    return values.view(torch.uint16).numpy() if values.dtype is torch.bfloat16 else values.numpy()


def made(path: Path, dtype: str = "bfloat16", *, compression: str = "none") -> Parts:
    """Write a shard to `path`, in the container its suffix names."""
    layout, small, states = parts(dtype)
    layout = ShardLayout(**{k: getattr(layout, k) for k in layout.__dataclass_fields__} | {"compression": compression})
    plugins.load_store(path.suffix[1:]).write(path, layout, small, states)
    return layout, small, states


def contents(path: Path) -> dict[str, Any]:
    """All that a reader gives, as bytes."""
    shard = plugins.load_store(path.suffix[1:]).open_shard(path)
    found = {name: getattr(shard, name)().tobytes() for name in ("offsets", "input_ids", "loss_mask")}
    return found | {"ids": tuple(shard.sample_ids)} | {s: shard.slot(s).tobytes() for s in shard.layout.slots}


def header(path: Path) -> tuple[dict[str, Any], int]:
    """The header as the format's README describes it, read without specctl."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), 8 + length


@pytest.fixture
def path(tmp_path: Path) -> Callable[[str], Path]:
    return lambda format: tmp_path / f"00000.{format}"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", tuple(NUMPY_DTYPE))
def test_a_shard_reads_back_bit_equal(path: Callable[[str], Path], format: str, dtype: str) -> None:
    layout, small, states = made(path(format), dtype)
    shard = plugins.load_store(format).open_shard(path(format))
    assert shard.layout == layout
    assert list(shard.sample_ids) == ["a", "chat-1", "\u00e9t\u00e9", "d" * 20]
    for name in ("offsets", "input_ids", "loss_mask"):
        found = getattr(shard, name)()
        assert found.dtype == small[name].dtype and found.tobytes() == small[name].tobytes()
    for slot in SLOTS:
        assert shard.slot(slot).dtype == NUMPY_DTYPE[dtype]
        assert shard.slot(slot).tobytes() == states[slot].tobytes()
        assert shard.slot(slot, slice(3, 8)).tobytes() == states[slot][3:8].tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_equal_content_gives_equal_bytes(tmp_path: Path, format: str) -> None:
    for name in ("a", "b"):
        made(tmp_path / f"{name}.{format}")
    assert (tmp_path / f"a.{format}").read_bytes() == (tmp_path / f"b.{format}").read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_an_unknown_slot_is_refused_with_the_slots_there_are(path: Callable[[str], Path], format: str) -> None:
    made(path(format))
    with pytest.raises(ShardError, match="no slot `5`; it has 0, 4, norm"):
        plugins.load_store(format).open_shard(path(format)).slot("5")


# safetensors


def test_the_safetensors_header_is_these_bytes(path: Callable[[str], Path]) -> None:
    small = {
        "offsets": np.array([0, 2], np.int64),
        "input_ids": np.array([5, 6], np.int32),
        "loss_mask": np.array([0, 1], np.uint8),
        "sample_ids": np.frombuffer(b"a", np.uint8).reshape(1, 1),
    }
    states = {"norm": np.array([[0x3FC0, 0xC010], [0x4780, 0x7F61]], np.uint16)}
    store.write(path("safetensors"), ShardLayout(1, 2, 2, "bfloat16", ("norm",)), small, states)
    text = (
        b'{"__metadata__":{"specctl":"{\\"compression\\": \\"none\\", \\"dtype\\": \\"bfloat16\\", '
        b'\\"hidden_size\\": 2, \\"num_samples\\": 1, \\"num_tokens\\": 2, \\"slots\\": [\\"norm\\"]}"},'
        b'"offsets":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"input_ids":{"dtype":"I32","shape":[2],"data_offsets":[16,24]},'
        b'"hidden.norm":{"dtype":"BF16","shape":[2,2],"data_offsets":[24,32]},'
        b'"loss_mask":{"dtype":"U8","shape":[2],"data_offsets":[32,34]},'
        b'"sample_ids":{"dtype":"U8","shape":[1,1],"data_offsets":[34,35]}}'
    )
    text += b" " * (-len(text) % 8)
    data = struct.pack("<2q2i4H2BB", 0, 2, 5, 6, 0x3FC0, 0xC010, 0x4780, 0x7F61, 0, 1, ord("a"))
    assert path("safetensors").read_bytes() == struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("dtype", tuple(NUMPY_DTYPE))
def test_the_safetensors_library_reads_a_shard_bit_equal(path: Callable[[str], Path], dtype: str) -> None:
    _layout, small, states = made(path("safetensors"), dtype)
    found = load_file(path("safetensors"))
    assert set(found) == {*small, *(f"hidden.{slot}" for slot in SLOTS)}
    for name, array in small.items():
        assert found[name].numpy().tobytes() == array.tobytes()
    for slot in SLOTS:
        assert found[f"hidden.{slot}"].dtype is getattr(torch, dtype)
        assert to_bits(found[f"hidden.{slot}"]).tobytes() == states[slot].tobytes()


@pytest.mark.parametrize("dtype", tuple(NUMPY_DTYPE))
def test_arrays_are_aligned_and_fill_the_file_without_holes(path: Callable[[str], Path], dtype: str) -> None:
    made(path("safetensors"), dtype)
    info, start = header(path("safetensors"))
    sizes = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2, "F16": 2, "U8": 1}
    position = 0
    del info["__metadata__"]
    for entry in sorted(info.values(), key=lambda entry: entry["data_offsets"]):
        begin, end = entry["data_offsets"]
        assert begin == position
        assert (start + begin) % sizes[entry["dtype"]] == 0
        position = end
    assert start + position == path("safetensors").stat().st_size


def test_slots_may_be_written_one_by_one_into_a_laid_down_file(tmp_path: Path) -> None:
    """Stages write their own slots; the file must not depend on who wrote what when."""
    layout, small, states = made(tmp_path / "whole.safetensors")
    pieces = tmp_path / "pieces.safetensors"
    store.create(pieces, layout, small)
    for slot in reversed(SLOTS):
        store.write_slot(pieces, slot, states[slot])
    assert pieces.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize("size", [0, 4, 50, -16])
def test_a_cut_safetensors_file_is_a_shard_error(path: Callable[[str], Path], size: int) -> None:
    """Source: safetensors#54: what a cut file raises is no API, and changed between versions."""
    made(path("safetensors"))
    raw = path("safetensors").read_bytes()
    path("safetensors").write_bytes(raw[:size])
    for read in (store.read_header, store.open_shard):
        with pytest.raises(ShardError) as caught:
            read(path("safetensors"))
        assert caught.value.where == str(path("safetensors"))
        assert "delete this file" in str(caught.value.hint)


def test_appended_bytes_are_a_shard_error(path: Callable[[str], Path]) -> None:
    made(path("safetensors"))
    with path("safetensors").open("ab") as file:
        file.write(bytes(8))
    with pytest.raises(ShardError, match=r"describes .* bytes and the file has") as caught:
        store.read_header(path("safetensors"))
    assert caught.value.where == str(path("safetensors")) and caught.value.hint


@pytest.mark.parametrize(
    "edit",
    [
        lambda info: info["hidden.0"].update(data_offsets=info["hidden.4"]["data_offsets"]),
        lambda info: info["hidden.0"].update(dtype="F16"),
        lambda info: info["offsets"].update(shape=[]),
        lambda info: info["offsets"].update(data_offsets=[0.0, 40.0]),
        lambda info: info.pop("loss_mask"),
        lambda info: info.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        lambda info: info["__metadata__"].update(specctl="[]"),
        lambda info: info.update(__metadata__=None),
    ],
    ids=["overlap", "dtype", "no shape", "floats", "missing", "unasked", "metadata", "no metadata"],
)
def test_a_header_that_contradicts_itself_is_a_shard_error(path: Callable[[str], Path], edit: Any) -> None:
    made(path("safetensors"))
    info, start = header(path("safetensors"))
    data = path("safetensors").read_bytes()[start:]
    edit(info)
    text = json.dumps(info).encode()
    path("safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(ShardError, match="the shard is damaged"):
        store.open_shard(path("safetensors"))


def test_no_mutated_header_is_anything_but_refused_or_read_right(path: Callable[[str], Path]) -> None:
    """A header byte that flips must never be another exception, nor other numbers."""
    made(path("safetensors"))
    raw, right = path("safetensors").read_bytes(), contents(path("safetensors"))
    _info, start = header(path("safetensors"))
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(200):
        mutated = bytearray(raw)
        mutated[rng.integers(start)] = rng.integers(256)
        path("safetensors").write_bytes(mutated)
        try:
            assert contents(path("safetensors")) == right
        except ShardError:
            refused += 1
    assert refused > 100


def test_offsets_that_do_not_cut_the_tokens_are_a_shard_error(path: Callable[[str], Path]) -> None:
    layout, small, states = parts()
    small["offsets"] = small["offsets"][::-1].copy()
    store.write(path("safetensors"), layout, small, states)
    with pytest.raises(ShardError, match="offsets do not cut"):
        store.open_shard(path("safetensors"))


# Parquet


@pytest.mark.parametrize("compression", parquet.COMPRESSIONS)
def test_bfloat16_survives_parquet_where_float16_would_not(path: Callable[[str], Path], compression: str) -> None:
    values = torch.tensor([[1.5, -2.25, 65536.0, 70000.0, 3e38]], dtype=torch.bfloat16)
    small = {
        "offsets": np.array([0, 1], np.int64),
        "input_ids": np.array([1], np.int32),
        "loss_mask": np.array([1], np.uint8),
        "sample_ids": np.frombuffer(b"a", np.uint8).reshape(1, 1),
    }
    layout = ShardLayout(1, 1, 5, "bfloat16", ("2",), compression)
    parquet.write(path("parquet"), layout, small, {"2": to_bits(values)})
    found = torch.from_numpy(parquet.open_shard(path("parquet")).slot("2")).view(torch.bfloat16)
    assert torch.equal(found, values)
    assert found.tolist()[0][:3] == [1.5, -2.25, 65536.0]


def test_no_parquet_column_has_32_bit_list_offsets(path: Callable[[str], Path]) -> None:
    """Source: apache/arrow#43185: 2^31 values in one `list` column overflow."""
    made(path("parquet"))
    lists = [field.type for field in pq.read_schema(path("parquet")) if field.name != "sample_id"]
    assert len(lists) == 2 + len(SLOTS)
    assert all(pa.types.is_large_list(kind) for kind in lists)


def test_row_groups_stay_within_the_bound(path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (3, 5, 2, 7, 1, 1, 40, 2, 2)
    row_bytes, bound = 6 * 2, 8 * 6 * 2
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", bound)
    layout, small, states = parts(lengths=lengths)
    parquet.write(path("parquet"), layout, small, states)
    file = pq.ParquetFile(path("parquet"))
    groups = [file.read_row_group(i)["input_ids"].to_pylist() for i in range(file.num_row_groups)]
    assert len(groups) > 4
    assert all(len(g) == 1 or sum(map(len, g)) * row_bytes <= bound for g in groups)
    shard = parquet.open_shard(path("parquet"))
    assert shard.offsets().tolist() == small["offsets"].tolist()
    assert all(shard.slot(slot).tobytes() == states[slot].tobytes() for slot in SLOTS)


@pytest.mark.parametrize("dtype", tuple(NUMPY_DTYPE))
def test_plain_pyarrow_reads_a_sample(path: Callable[[str], Path], dtype: str) -> None:
    _layout, small, states = made(path("parquet"), dtype, compression="zstd")
    table = ds.dataset(path("parquet").parent, format="parquet").to_table()
    assert table["sample_id"].to_pylist()[1] == "chat-1"
    assert table["input_ids"][1].as_py() == small["input_ids"][3:8].tolist()
    field = table.schema.field("hidden.4")
    stored = np.array(table["hidden.4"][1].values).reshape(-1, int(field.metadata[b"hidden_size"]))
    found = torch.from_numpy(stored).view(getattr(torch, field.metadata[b"dtype"].decode()))
    assert to_bits(found).tobytes() == states["4"][3:8].tobytes()


@pytest.mark.parametrize("size", [0, 4, 50, 200, -16, -1])
def test_a_cut_parquet_file_is_a_shard_error(path: Callable[[str], Path], size: int) -> None:
    made(path("parquet"))
    path("parquet").write_bytes(path("parquet").read_bytes()[:size])
    with pytest.raises(ShardError, match="damaged or cut") as caught:
        parquet.open_shard(path("parquet"))
    assert caught.value.where == str(path("parquet")) and caught.value.hint


def test_another_parquet_file_is_a_shard_error(path: Callable[[str], Path]) -> None:
    pq.write_table(pa.table({"sample_id": ["a"], "text": ["b"]}), path("parquet"))
    with pytest.raises(ShardError, match="damaged or cut"):
        parquet.open_shard(path("parquet"))


def test_no_mutated_parquet_file_raises_anything_but_a_shard_error(path: Callable[[str], Path]) -> None:
    made(path("parquet"), compression="zstd")
    raw = path("parquet").read_bytes()
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(200):
        mutated = bytearray(raw)
        mutated[rng.integers(len(raw))] = rng.integers(256)
        path("parquet").write_bytes(mutated)
        try:
            contents(path("parquet"))
        except ShardError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("format", FORMATS)
def test_garbage_and_a_missing_file_are_shard_errors(path: Callable[[str], Path], format: str) -> None:
    with pytest.raises(ShardError, match="the shard is missing"):
        plugins.load_store(format).open_shard(path(format))
    path(format).write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(ShardError, match="damaged"):
        plugins.load_store(format).open_shard(path(format))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_another_size_than_listed_is_refused_unread(path: Callable[[str], Path], format: str) -> None:
    made(path(format))
    size = path(format).stat().st_size
    entry = ShardEntry(path(format).name, 4, 17, 0, size + 1, "")
    with pytest.raises(ShardError, match=f"has {size} bytes; {size + 1} were written"):
        plugins.load_store(format).open_shard(path(format), entry)


def test_the_library_maps_one_slot_without_the_others(path: Callable[[str], Path]) -> None:
    _layout, _small, states = made(path("safetensors"))
    with safetensors.safe_open(path("safetensors"), "pt") as file:
        assert to_bits(file.get_slice("hidden.4")[3:8]).tobytes() == states["4"][3:8].tobytes()


def test_a_reader_gives_views_that_cannot_be_written(path: Callable[[str], Path]) -> None:
    made(path("safetensors"))
    with pytest.raises(ValueError, match="read-only"):
        store.open_shard(path("safetensors")).slot("0")[0, 0] = 1

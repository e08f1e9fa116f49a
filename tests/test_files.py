"""Foreign checkpoint files: read as the libraries read them, refused by name when damaged or hostile."""

import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from specctl.errors import InputError, MachineError, SpecctlError, UsageError
from specctl.files import safetensors as files
from specctl.files.checkpoint import MAX_LIKE_PROBLEMS, Checkpoint, open_checkpoint
from specctl.files.durable import copy_plain, new_folder
from specctl.files.jsonfile import read_json
from specctl.files.safetensors import read_header
from specctl.files.tensors import (
    FLOATS,
    INTEGERS,
    ITEM_BYTES,
    Gather,
    Table,
    TensorEntry,
    chunks,
    decode,
    float_chunks,
    read_array,
)

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def drawn(code: str, *shape: int, seed: int = 0) -> torch.Tensor:
    """A tensor of random bits (of zeros and ones for BOOL)."""
    rng = np.random.default_rng(seed)
    count = int(np.prod(shape)) * ITEM_BYTES[code]
    raw = rng.integers(0, 2 if code == "BOOL" else 256, count).astype(np.uint8)
    return torch.from_numpy(raw).view(DTYPES[code]).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def all_bytes(source: Any, size: int = 8 << 20) -> bytes:
    return b"".join(chunks(source, size))


@pytest.fixture
def head(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a small draft, saved by the library as `model.safetensors`, with a config beside it."""
    tensors = {
        "fc.weight": drawn("BF16", 4, 12, seed=1),
        "lm_head.weight": drawn("BF16", 6, 4, seed=2),
        "d2t": torch.arange(6),
        "t2d": drawn("BOOL", 16, seed=3),
        "scale": torch.tensor(1.5),
        "empty": torch.zeros(0, 5),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    return tensors


def with_header(path: Path, text: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


# safetensors


def test_a_header_gives_what_the_library_reads(tmp_path: Path, head: dict[str, torch.Tensor]) -> None:
    entries, metadata = read_header(tmp_path / "model.safetensors")
    assert metadata == {"format": "pt"}
    assert entries.keys() == head.keys()
    for name, tensor in head.items():
        assert DTYPES[entries[name].dtype] is tensor.dtype
        assert entries[name].shape == tuple(tensor.shape)
        assert all_bytes(entries[name]) == raw_bytes(tensor)


def test_what_is_written_equals_the_librarys_own_bytes(tmp_path: Path) -> None:
    """Names that sort differently as text and as bytes, all dtypes, a scalar, an empty tensor, metadata."""
    tensors = {f"{n}.{code}": drawn(code, 3, 5, seed=n) for n, code in enumerate(DTYPES)}
    tensors |= {"\u00e9t\u00e9": torch.ones(2), "Z": torch.ones(2), 'a\n\x7f"': torch.ones(2), "empty": torch.zeros(0)}
    tensors |= {"\uffff": torch.ones(1), "\U00010000": torch.ones(1), "scalar": torch.tensor(2.0)}
    # One key: the library orders several by chance, run by run.
    for metadata in (None, {"a": "\u00e9\t"}):
        expected = save(tensors, metadata)
        (tmp_path / "theirs.safetensors").write_bytes(expected)
        entries, _ = read_header(tmp_path / "theirs.safetensors")
        files.write(tmp_path / "ours.safetensors", dict(sorted(entries.items(), reverse=True)), metadata)
        assert (tmp_path / "ours.safetensors").read_bytes() == expected


def test_writing_tells_each_piece(tmp_path: Path, head: dict[str, torch.Tensor]) -> None:
    entries, _ = read_header(tmp_path / "model.safetensors")
    told: list[int] = []
    files.write(tmp_path / "out.safetensors", entries, None, advance=told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in head.values())


def test_a_table_and_a_gather_are_written_like_any_tensor(tmp_path: Path, head: dict[str, torch.Tensor]) -> None:
    entries, _ = read_header(tmp_path / "model.safetensors")
    order = (3, 0, 5, 1, 2, 4)
    table = Table("I64", (3,), struct.pack("<3q", 4, -5, 6))
    rows = Gather(entries["lm_head.weight"], axis=0, order=order)
    columns = Gather(entries["fc.weight"], axis=1, order=(2, 0, 1), block=4)
    files.write(tmp_path / "out.safetensors", {"d2t": table, "lm_head": rows, "fc": columns}, None)
    found = load_file(tmp_path / "out.safetensors")
    assert found["d2t"].tolist() == [4, -5, 6]
    assert raw_bytes(found["lm_head"]) == raw_bytes(head["lm_head.weight"][list(order)])
    expected = head["fc.weight"].reshape(4, 3, 4)[:, [2, 0, 1]].reshape(4, 12)
    assert raw_bytes(found["fc"]) == raw_bytes(expected)


@pytest.mark.parametrize("size", [1, 7, 8, 24, 50, 1 << 20])
def test_pieces_of_any_size_are_the_same_bytes(tmp_path: Path, head: dict[str, torch.Tensor], size: int) -> None:
    entry = read_header(tmp_path / "model.safetensors")[0]["fc.weight"]
    columns = Gather(entry, axis=1, order=(1, 2, 0, 3, 5, 4), block=2)
    rows = Gather(entry, axis=0, order=(1, 0), block=2)
    for source in (entry, columns, rows, Table("U8", (9,), bytes(range(9)))):
        assert all_bytes(source, size) == all_bytes(source)
        assert size < 24 or all(len(piece) <= size for piece in chunks(source, size))


@pytest.mark.parametrize(
    ("axis", "order", "block"),
    [(0, (0, 0, 1, 2), 1), (0, (0, 1), 1), (1, (0, 1), 5), (2, (0,), 1), (0, (0, 4, 1, 2), 1)],
)
def test_an_order_that_loses_rows_is_refused(tmp_path: Path, head: Any, axis: int, order: Any, block: int) -> None:
    entry = read_header(tmp_path / "model.safetensors")[0]["fc.weight"]
    with pytest.raises(InputError, match=r"no permutation|no blocks"):
        Gather(entry, axis, order, block)


@pytest.mark.parametrize("code", DTYPES)
def test_numbers_are_those_of_torch(tmp_path: Path, code: str) -> None:
    tensor = drawn(code, 64, 8)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    entry = read_header(tmp_path / "x.safetensors")[0]["x"]
    found = read_array(entry)
    is_widened = code == "BF16" or code.startswith("F8")
    expected = (tensor.float() if is_widened else tensor).numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    if code in FLOATS:
        pieces = dict(float_chunks(entry, 24))
        assert list(pieces) == [0, 24, 48]
        np.testing.assert_array_equal(np.concatenate(list(pieces.values())), expected.astype(pieces[0].dtype))
        assert pieces[0].dtype == (np.float64 if code == "F64" else np.float32)
    else:
        assert code in INTEGERS or code in ("BOOL", "C64")
        with pytest.raises(InputError, match="expected floats"):
            next(float_chunks(entry, 1))


@pytest.mark.parametrize("code", [code for code in DTYPES if code.startswith("F8")])
def test_every_8_bit_float_is_the_number_that_torch_says(code: str) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(decode(raw.numpy().tobytes(), code), raw.view(DTYPES[code]).float().numpy())


def test_scalars_and_empty_tensors_have_numbers_too(tmp_path: Path, head: Any) -> None:
    entries, _ = read_header(tmp_path / "model.safetensors")
    assert read_array(entries["scale"]) == 1.5
    assert read_array(entries["empty"]).shape == (0, 5)
    assert [(row, values.tolist()) for row, values in float_chunks(entries["scale"], 4)] == [(0, [1.5])]
    assert list(float_chunks(entries["empty"], 4)) == []


def test_a_tensor_above_the_limit_is_refused_unread(tmp_path: Path, head: Any) -> None:
    entry = read_header(tmp_path / "model.safetensors")[0]["d2t"]
    with pytest.raises(InputError, match="`d2t` has 48 bytes; at most 47"):
        read_array(entry, 47)


def test_a_file_that_shrank_after_its_header_was_read_is_refused(tmp_path: Path, head: Any) -> None:
    path = tmp_path / "model.safetensors"
    entries, _ = read_header(path)
    os.truncate(path, path.stat().st_size - 1)
    last = max(entries.values(), key=lambda entry: entry.begin)
    for read in (
        all_bytes,
        read_array,
        lambda e: all_bytes(Gather(entries["fc.weight"], 1, (0,), 12)) and all_bytes(e),
    ):
        with pytest.raises(InputError, match="become shorter"):
            read(last)
    path.unlink()
    with pytest.raises(InputError, match="missing"):
        all_bytes(last)


def test_a_five_gigabyte_file_is_opened_by_its_header_in_no_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    text = json.dumps({"x": {"dtype": "F32", "shape": [5, 1 << 28], "data_offsets": [0, 5 << 30]}}).encode()
    with_header(path, text)
    os.truncate(path, 8 + len(text) + (5 << 30))
    started = time.monotonic()
    entry = read_header(path)[0]["x"]
    assert time.monotonic() - started < 0.5
    assert entry.nbytes == 5 << 30
    assert len(next(iter(chunks(entry)))) == 8 << 20
    with pytest.raises(InputError, match="a row of `x` has"):
        next(float_chunks(entry, 1))


ONE = '"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
HEADERS = {
    "no object": (b"[1]", "no JSON object"),
    "not JSON": (b'{"x":', "no JSON of safetensors"),
    "nothing after": (b"{} x", "no JSON of safetensors"),
    "UTF-16": ("{}".encode("utf-16"), "no JSON object"),
    "no UTF-8": (b'{"\xff":1}', "no UTF-8"),
    "half a pair in a name": (('{"\\ud800' + ONE[1:] + "}").encode(), "no UTF-8"),
    "half a pair in the metadata": (('{"__metadata__":{"a":"\\udfff"},' + ONE + "}").encode(), "no UTF-8"),
    "a name twice": (f"{{{ONE},{ONE}}}".encode(), "`x` stands in it twice"),
    "a key twice": (ONE.replace("{", '{"dtype":"U8",').join("{}").encode(), "`dtype` stands in it twice"),
    "deep": (b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "no JSON of safetensors"),
    "many": (b"{" + b"[]," * 700_000 + b"}", "more than 200000 tensors"),
    "numbers": (b'{"x":[' + b"1," * 4_100_000 + b"1]}", "more than 200000 tensors"),
    "NaN": (ONE.replace("[2]", "[NaN]").join("{}").encode(), "`NaN` is no number"),
    "a number of 5000 digits": (ONE.replace("[2]", f"[{'9' * 5000}]").join("{}").encode(), "no JSON of safetensors"),
    "unknown dtype": (ONE.replace("U8", "F4").join("{}").encode(), "dtype `F4`"),
    "dtype no text": (ONE.replace('"U8"', "[[]]").join("{}").encode(), "dtype `a list`"),
    "negative": (ONE.replace("[2]", "[-2]").join("{}").encode(), r"shape `\[-2\]`"),
    "both negative": (ONE.replace("[2]", "[-2,-1]").join("{}").encode(), "shape"),
    "bool": (ONE.replace("[2]", "[true]").join("{}").encode(), "shape"),
    "float": (ONE.replace("[2]", "[2.0]").join("{}").encode(), "shape"),
    "huge": (ONE.replace("[2]", f"[{2**64},0]").join("{}").encode(), "shape"),
    "product of 2^64 + 2": (ONE.replace("[2]", "[9223372036854775807,2]").join("{}").encode(), "needs 1844674407"),
    "65 dimensions": (ONE.replace("[2]", str([2] + [1] * 64)).join("{}").encode(), "up to 64"),
    "shape a number": (ONE.replace("[2]", "2").join("{}").encode(), "shape `2`"),
    "one offset": (ONE.replace("[0,2]", "[0]").join("{}").encode(), "data_offsets"),
    "backward": (ONE.replace("[0,2]", "[2,0]").join("{}").encode(), "data_offsets"),
    "count": (ONE.replace("U8", "I16").join("{}").encode(), "has 2 bytes; I16 of shape .* needs 4"),
    "a key missing": (b'{"x":{"dtype":"U8","shape":[2]}}', "needs `dtype`, `shape` and `data_offsets`"),
    "no entry": (b'{"x":3}', "needs `dtype`"),
    "metadata of numbers": (f'{{"__metadata__":{{"a":1}},{ONE}}}'.encode(), "no map from strings to strings"),
    "metadata null": (f'{{"__metadata__":null,{ONE}}}'.encode(), "no map from strings to strings"),
    "overlap": (f"{{{ONE},{ONE.replace('x', 'y')}}}".encode(), "overlaps"),
    "hole": (ONE.replace("[0,2]", "[1,3]").join("{}").encode(), "leaves a hole"),
    "beyond the end": (ONE.replace("[2]", "[3]").replace("[0,2]", "[0,3]").join("{}").encode(), "the file has"),
    "trailing": (b"{}", "the header describes 10 bytes and the file has 12"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_header_is_refused_by_what_is_wrong(tmp_path: Path, name: str) -> None:
    text, message = HEADERS[name]
    path = with_header(tmp_path / "x.safetensors", text, b"ab")
    started = time.monotonic()
    with pytest.raises(InputError, match=message) as caught:
        read_header(path)
    assert caught.value.where == str(path)
    assert len(str(caught.value)) < 500
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        bytes(20),
    ],
)
def test_a_cut_file_is_refused_with_its_sizes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(InputError, match=f"bytes of {len(raw)}"):
        read_header(tmp_path / "x.safetensors")


def test_a_header_beyond_the_formats_bound_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 100_000_001) + b"{")
    os.truncate(tmp_path / "x.safetensors", 200_000_000)
    with pytest.raises(InputError, match="100000001 bytes"):
        read_header(tmp_path / "x.safetensors")


def test_many_names_of_which_two_are_equal_are_refused_in_time(tmp_path: Path) -> None:
    names = [*(f'"{n}":0' for n in range(150_000)), '"149999":0']
    started = time.monotonic()
    with pytest.raises(InputError, match="`149999` stands in it twice"):
        read_header(with_header(tmp_path / "x.safetensors", ("{" + ",".join(names) + "}").encode()))
    assert time.monotonic() - started < 1


def test_a_pointer_of_git_lfs_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(InputError, match="Git LFS pointer") as caught:
        read_header(tmp_path / "x.safetensors")
    assert "git lfs pull" in str(caught.value.hint)


def test_writing_over_what_is_read_and_keeping_the_formats_name_are_refused(tmp_path: Path, head: Any) -> None:
    path = tmp_path / "model.safetensors"
    before = path.read_bytes()
    entries, _ = read_header(path)
    with pytest.raises(InputError, match="one that is read"):
        files.write(path, entries, None)
    with pytest.raises(InputError, match="__metadata__"):
        files.write(tmp_path / "y.safetensors", {"__metadata__": entries["d2t"]}, None)
    with pytest.raises(InputError, match="half a surrogate pair"):
        files.write(tmp_path / "y.safetensors", {"\ud800": entries["d2t"]}, None)
    assert path.read_bytes() == before


# JSON


def test_an_object_is_read_and_doubled_keys_are_named(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b'{"a": 1, "b": [{"c": {"d": 1, "d": 2}}], "a": 3, "n": NaN, "i": -Infinity}')
    data, twice = read_json(path)
    assert (data["a"], data["b"]) == (3, [{"c": {"d": 2}}])
    assert twice == ("a", "b.0.c.d")
    assert data["n"] != data["n"] and data["i"] == float("-inf")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b'{"a": 1,}', "expected JSON"),
        (b"[1]", "found a list"),
        (b"3", "found a number"),
        (b"null", "found null"),
        (b'"a"', "found a string"),
        (b"true", "found a boolean"),
        (b'{"a": "\xff"}', "UTF-8 text: byte 7 is 0xff"),
        ('{"a": 1}'.encode("utf-16"), "UTF-8"),
        (b'{"a":' * 20_000, "nested too deeply"),
        (b'{"a":' + b"1" * 5000 + b"}", "expected JSON"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b'{"\\udc00": 1}', "half a surrogate pair"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "has 1009 bytes; at most 500"),
    ],
)
def test_what_is_no_json_object_is_refused_with_what_it_is(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "c.json").write_bytes(raw)
    with pytest.raises(InputError, match=message) as caught:
        read_json(tmp_path / "c.json", limit_bytes=500 if len(raw) == 1009 else 16 << 20)
    assert caught.value.where == str(tmp_path / "c.json")


def test_a_surrogate_pair_that_is_whole_is_fine(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"a": "\\ud83d\\ude00"}')
    assert read_json(tmp_path / "c.json")[0] == {"a": "\U0001f600"}


def test_no_folder_missing_file_fifo_or_strange_path_is_opened_as_json(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        (".", "found a folder"),
        ("pipe", "found a FIFO"),
        ("none", "missing"),
        ("x" * 300, "cannot be read"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(InputError, match=message):
            read_json(tmp_path / name)
    with pytest.raises(InputError, match="found a device"):
        read_json(Path("/dev/zero"))


def test_doubled_keys_behind_long_names_cost_no_memory(tmp_path: Path) -> None:
    """Naively every value would get its whole dotted name: 2 MB here, ten thousand times."""
    text = '{"' + "k" * 2_000_000 + '": [' + "{}," * 10_000 + '{"a": 1, "a": 2}]}'
    (tmp_path / "c.json").write_text(text)
    started = time.monotonic()
    (twice,) = read_json(tmp_path / "c.json")[1]
    assert twice.endswith("....10000.a") and len(twice) < 300
    assert time.monotonic() - started < 1


# checkpoints


def rules(checkpoint: Checkpoint) -> list[str]:
    return [problem.rule for problem in checkpoint.problems]


def sharded(folder: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, Any] | None = None) -> Path:
    """A folder of shards with an index and a config."""
    folder.mkdir(exist_ok=True)
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    if weight_map is None:
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_plain_folder_is_read_without_problems(tmp_path: Path, head: dict[str, torch.Tensor]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "sub").mkdir()
    found = open_checkpoint(tmp_path)
    assert (found.container, found.problems, found.has_config) == ("safetensors", (), True)
    assert found.config == {"architectures": ["LlamaForCausalLMEagle3"]}
    assert found.tensors.keys() == head.keys()
    assert found.weight_files == (tmp_path / "model.safetensors",)
    assert found.side_files == ("tokenizer.json",)


def test_a_weights_file_brings_the_config_beside_it(tmp_path: Path, head: dict[str, torch.Tensor]) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")
    found = open_checkpoint(tmp_path / "model.safetensors")
    assert found.has_config and found.tensors.keys() == head.keys()
    assert found.side_files == ("other.safetensors",)
    assert not found.problems


def test_an_index_opens_exactly_the_files_it_names_and_wins(tmp_path: Path) -> None:
    """Source: deepseek-ai/DeepSpec#11, Blaizzy/mlx-vlm#1464: a stray file was merged in by globbing."""
    one = {"embed": torch.ones(2), "unnamed": torch.ones(1)}
    sharded(tmp_path, {"a.safetensors": one, "b.safetensors": {"lm_head": torch.ones(3)}})
    save_file({"lm_head": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"no safetensors at all")
    found = open_checkpoint(tmp_path)
    assert found.container == "sharded"
    assert [path.name for path in found.weight_files] == ["a.safetensors", "b.safetensors"]
    assert found.tensors.keys() == {"embed", "unnamed", "lm_head"}
    assert read_array(found.tensors["lm_head"]).tolist() == [1, 1, 1]
    assert [(p.rule, p.where) for p in found.problems] == [
        ("WEIGHTS_STRAY", "c.safetensors"),
        ("WEIGHTS_STRAY", "model.safetensors"),
    ]
    assert found.side_files == ("c.safetensors", "model.safetensors")


def test_a_shard_that_is_missing_lacks_a_tensor_or_repeats_one_is_named(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": torch.ones(2)}, "b.safetensors": {"x": torch.zeros(2), "y": torch.ones(1)}}
    weight_map = {"x": "b.safetensors", "z": "a.safetensors", "w": "c.safetensors", "y": "./b.safetensors"}
    found = open_checkpoint(sharded(tmp_path, shards, weight_map))
    assert [(p.rule, p.where) for p in found.problems] == [
        ("INDEX_TENSOR_MISSING", "z"),
        ("TENSOR_TWICE", "x"),
        ("INDEX_SHARD_MISSING", "c.safetensors"),
    ]
    assert read_array(found.tensors["x"]).tolist() == [0, 0]


@pytest.mark.parametrize(
    "shard", ["../../etc/passwd", "/etc/passwd", "sub/../../x.safetensors", "..", "..\\x.safetensors", "C:\\x"]
)
def test_a_shard_outside_the_folder_is_not_opened(tmp_path: Path, shard: str) -> None:
    folder = sharded(tmp_path / "in", {"a.safetensors": {"x": torch.ones(2)}}, {"x": "a.safetensors", "y": shard})
    save_file({"y": torch.ones(1)}, tmp_path / "x.safetensors")
    found = open_checkpoint(folder)
    assert rules(found) == ["INDEX_PATH_ESCAPES"]
    assert found.tensors.keys() == {"x"}


@pytest.mark.parametrize("shard", [3, None, "", ".", "a\0b", ["a.safetensors"], {"a": 1}])
def test_a_shard_that_is_no_file_name_breaks_the_index_and_not_us(tmp_path: Path, shard: Any) -> None:
    found = open_checkpoint(
        sharded(tmp_path, {"a.safetensors": {"x": torch.ones(2)}}, {"x": "a.safetensors", "y": shard})
    )
    assert rules(found) == ["INDEX_BROKEN"]
    assert found.tensors.keys() == {"x"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a":'])
def test_an_index_without_a_map_is_a_problem(tmp_path: Path, text: str) -> None:
    sharded(tmp_path, {"a.safetensors": {"x": torch.ones(2)}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    found = open_checkpoint(tmp_path)
    assert (found.container, dict(found.tensors)) == ("sharded", {})
    assert "INDEX_BROKEN" in rules(found)


def test_shards_in_a_folder_below_are_read_and_named_as_vllm_does_not(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    sharded(tmp_path, {"sub/a.safetensors": {"x": torch.ones(2)}})
    found = open_checkpoint(tmp_path)
    assert found.tensors.keys() == {"x"}
    assert [(p.rule, p.where, p.expected, p.found) for p in found.problems] == [
        (
            "INDEX_SUBFOLDER",
            "sub/a.safetensors",
            "a file beside config.json",
            "a file in the folder `sub`, where vLLM does not look",
        )
    ]


def test_problems_without_end_are_counted_and_not_listed(tmp_path: Path) -> None:
    weight_map = {f"t{i}": "a.safetensors" for i in range(5000)}
    found = open_checkpoint(sharded(tmp_path, {"a.safetensors": {"x": torch.ones(2)}}, weight_map))
    assert len(found.problems) == MAX_LIKE_PROBLEMS + 1
    assert found.problems[-1].found == "4980 more like these"


def test_files_without_an_index_are_all_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "draft.safetensors")
    assert not open_checkpoint(tmp_path).problems
    save_file({"x": torch.ones(1), "y": torch.ones(1)}, tmp_path / "second.safetensors")
    found = open_checkpoint(tmp_path)
    assert (found.container, rules(found), set(found.tensors)) == ("safetensors", ["TENSOR_TWICE"], {"x", "y"})


def test_an_adapter_is_no_weights_and_in_the_way_of_them(tmp_path: Path) -> None:
    """vLLM takes every *.safetensors of the folder, and stops at the adapter's names."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"lora": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert rules(open_checkpoint(tmp_path)) == ["WEIGHTS_MISSING"]
    for name in ("draft.safetensors", "model.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)
        found = open_checkpoint(tmp_path)
        strays = [(p.where, p.expected) for p in found.problems if p.where.startswith("adapter_")]
        assert strays == [("adapter_model.safetensors", f"only what `{name}` stands for")]
        assert found.tensors.keys() == {"x"}


def consolidated(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    return [(p.where, p.found) for p in checkpoint.problems if p.rule == "WEIGHTS_CONSOLIDATED"]


def test_a_consolidated_file_anywhere_is_named_as_vllm_takes_it_instead(tmp_path: Path, head: Any) -> None:
    assert not open_checkpoint(tmp_path).problems
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (below / "consolidated.00.safetensors").write_bytes(b"not opened")
    found = "a file that makes vLLM look for weights of this name beside config.json, and for no others"
    assert consolidated(open_checkpoint(tmp_path)) == [("a/b/consolidated.00.safetensors", found)]
    (tmp_path / "consolidated.safetensors").write_bytes(b"not opened")
    checkpoint = open_checkpoint(tmp_path)
    found = "a file that vLLM loads in place of `model.safetensors`"
    assert consolidated(checkpoint) == [("consolidated.safetensors", found)]
    assert rules(checkpoint) == ["WEIGHTS_CONSOLIDATED"]
    assert checkpoint.problems[0].expected == "no file of this name, here or below"
    assert checkpoint.tensors.keys() == head.keys()


def test_consolidated_weights_alone_are_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    found = open_checkpoint(tmp_path)
    assert (rules(found), set(found.tensors)) == ([], {"x"})


def test_the_search_below_ends_and_follows_no_link(tmp_path: Path, head: Any) -> None:
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "consolidated.safetensors").write_bytes(b"")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "loop").symlink_to(tmp_path)
    deep = tmp_path.joinpath(*"abcdefgh")
    deep.mkdir(parents=True)
    (deep / "consolidated.safetensors").write_bytes(b"")
    many = tmp_path / "many"
    many.mkdir()
    for i in range(6000):
        (many / f"{i:04}").touch()
    (many / "folder").mkdir()
    began = time.monotonic()
    assert not open_checkpoint(tmp_path).problems
    assert time.monotonic() - began < 0.5


def test_pickles_are_read_only_where_no_safetensors_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"p": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    torch.save({"junk": 1}, tmp_path / "training_args.bin")
    assert open_checkpoint(tmp_path).container == "bin"
    torch.save({"q": torch.ones(1)}, tmp_path / "one.bin")
    index = {"weight_map": {"q": "one.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = open_checkpoint(tmp_path)
    # vLLM loads every *.bin of the folder, whatever the index says.
    assert (found.container, set(found.tensors), found.problems) == ("sharded-bin", {"p", "q"}, ())
    save_file({"s": torch.ones(1)}, tmp_path / "any.safetensors")
    assert open_checkpoint(tmp_path).tensors.keys() == {"s"}


class _Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_second_pickle_is_opened_as_vllm_does(tmp_path: Path, is_sharded: bool) -> None:
    """It was never looked at, also where it named os.system."""
    (tmp_path / "config.json").write_text("{}")
    torch.save({"p": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    if is_sharded:
        (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"p": "pytorch_model.bin"}}')
    torch.save({"p": torch.zeros(1)}, tmp_path / "zz.bin")
    found = open_checkpoint(tmp_path)
    assert (rules(found), [path.name for path in found.weight_files]) == (
        ["TENSOR_TWICE"],
        ["pytorch_model.bin", "zz.bin"],
    )
    for name in ("zz.bin", "adapter_model.bin", "scheduler.bin"):
        (tmp_path / "zz.bin").unlink(missing_ok=True)
        torch.save({"p": _Calls()}, tmp_path / name)
        assert [(p.rule, p.where) for p in open_checkpoint(tmp_path).problems] == [("WEIGHTS_UNSAFE", name)]
        (tmp_path / name).unlink()
    for name in ("training_args.bin", "optimizer.bin"):
        torch.save({"p": _Calls()}, tmp_path / name)
    assert not open_checkpoint(tmp_path).problems
    # One file that was named is that file only.
    (tmp_path / "zz.bin").write_bytes(b"")
    assert not open_checkpoint(tmp_path / "pytorch_model.bin").problems


def test_a_config_that_is_missing_broken_or_doubled_is_a_problem(tmp_path: Path, head: Any) -> None:
    config = tmp_path / "config.json"
    for text, rule, has_config in (
        ("{", "CONFIG_BROKEN", False),
        ("[]", "CONFIG_BROKEN", False),
        ('{"a": 1, "a": 2}', "CONFIG_KEY_TWICE", True),
    ):
        config.write_text(text)
        found = open_checkpoint(tmp_path)
        assert (rules(found), found.has_config) == ([rule], has_config)
    config.unlink()
    found = open_checkpoint(tmp_path)
    assert (rules(found), found.config) == (["CONFIG_MISSING"], {})


def test_a_config_alone_misses_weights_and_cut_weights_are_broken(tmp_path: Path, head: Any) -> None:
    os.truncate(tmp_path / "model.safetensors", 100)
    found = open_checkpoint(tmp_path)
    assert (rules(found), dict(found.tensors), found.container) == (["WEIGHTS_BROKEN"], {}, "safetensors")
    (tmp_path / "model.safetensors").unlink()
    found = open_checkpoint(tmp_path)
    assert (rules(found), found.container) == (["WEIGHTS_MISSING"], "none")


def test_links_of_the_hub_cache_are_followed(tmp_path: Path, head: dict[str, torch.Tensor]) -> None:
    repo = tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).rename(repo / "blobs" / f"hash-{name[:2]}")
        (snapshot / name).symlink_to(f"../../blobs/hash-{name[:2]}")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        found = open_checkpoint(folder)
        assert not found.problems and found.tensors.keys() == head.keys()
    (snapshot / "config.json").unlink()
    (repo / "secret.json").write_text("{}")
    (snapshot / "config.json").symlink_to("../../secret.json")
    assert rules(open_checkpoint(snapshot)) == ["LINK_OUTSIDE"]


def test_links_that_leave_the_folder_are_not_read(tmp_path: Path, head: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(tmp_path / name)
    (folder / "eagle_meta.pt").symlink_to("/etc/passwd")
    found = open_checkpoint(folder)
    assert rules(found) == ["LINK_OUTSIDE", "LINK_OUTSIDE"]
    assert (found.config, dict(found.tensors), found.side_files, found.weight_files) == ({}, {}, (), ())


def test_links_within_the_folder_are_followed_and_loops_are_not(tmp_path: Path, head: Any) -> None:
    (tmp_path / "model.safetensors").rename(tmp_path / "weights")
    (tmp_path / "model.safetensors").symlink_to("weights")
    assert not open_checkpoint(tmp_path).problems
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("config.json")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    assert rules(open_checkpoint(tmp_path)) == ["CONFIG_BROKEN", "WEIGHTS_BROKEN"]


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "eagle_meta.pt"):
        os.mkfifo(tmp_path / name)
    found = open_checkpoint(tmp_path)
    assert [(p.rule, p.found) for p in found.problems] == [("CONFIG_BROKEN", "a FIFO"), ("WEIGHTS_BROKEN", "a FIFO")]
    assert found.side_files == ()
    with pytest.raises(InputError, match="found a FIFO"):
        open_checkpoint(tmp_path / "config.json")
    with pytest.raises(InputError, match="found a FIFO"):
        read_header(tmp_path / "model.safetensors")


def test_what_is_no_checkpoint_at_all_is_an_error_with_the_next_step(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(InputError, match="expected a checkpoint folder"):
            open_checkpoint(path)
    (tmp_path / "note.txt").write_text("")
    with pytest.raises(InputError, match=r"found a `\.txt` file"):
        open_checkpoint(tmp_path / "note.txt")

    def hint() -> str:
        with pytest.raises(InputError, match=r"neither config\.json nor weights") as caught:
            open_checkpoint(tmp_path)
        return str(caught.value.hint)

    assert "name the folder" in hint()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert "LoRA adapter" in hint()
    (tmp_path / "training_state.pt").write_bytes(b"")
    assert "resume state" in hint()
    (tmp_path / "model" / "consolidated").mkdir(parents=True)
    (tmp_path / "model" / "consolidated" / "config.json").write_text("{}")
    assert str(tmp_path / "model" / "consolidated") in hint()


def test_names_with_control_characters_are_shown_and_not_sent_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "\x1b[31m.safetensors").write_bytes(b"")
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"")
    found = open_checkpoint(tmp_path)
    text = repr(found.side_files) + found.problems[0].where
    text.encode()
    assert found.problems[0].where == "\\x1b[31m.safetensors"


# folders that appear whole


def test_a_new_folder_appears_whole_with_all_that_was_written(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_folder(out, "a checkpoint") as folder:
        assert folder.parent == out.parent and folder.name.startswith(".") and not out.exists()
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("y")
    assert (out / "sub" / "x").read_text() == "y"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert out.stat().st_mode & 0o777 == 0o777 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_empty_folder_and_a_link_to_one_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    with new_folder(tmp_path / "link", "a checkpoint") as folder:
        (folder / "x").write_text("y")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out" / "x").read_text() == "y"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, InputError])
def test_nothing_is_left_when_anything_fails(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), new_folder(tmp_path / "out", "a checkpoint") as folder:
        (folder / "x").write_text("y")
        raise error("stop")
    assert not list(tmp_path.iterdir())


def test_what_stands_in_the_place_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    (tmp_path / "file").write_text("")
    for name in ("out", "file"):
        with (
            pytest.raises(UsageError, match="new or empty folder for a checkpoint"),
            new_folder(tmp_path / name, "a checkpoint"),
        ):
            pytest.fail("entered")
    with pytest.raises(UsageError), new_folder(tmp_path / "late", "a checkpoint") as folder:
        (folder / "x").write_text("")
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "other").write_text("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "late", "out"]


def test_a_full_disk_and_a_parent_that_is_a_file_are_machine_errors(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="the disk is full"), new_folder(tmp_path / "out", "a checkpoint"):
        # A real full device: every write to it fails with ENOSPC.
        Path("/dev/full").write_bytes(b"x")
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write"), new_folder(tmp_path / "file" / "out", "a checkpoint"):
        pytest.fail("entered")


def test_a_copy_is_whole_or_not_there(tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_bytes(b"{}" * 50)
    assert copy_plain(source, tmp_path / "b.json", limit=100)
    assert (tmp_path / "b.json").read_bytes() == source.read_bytes()
    assert not copy_plain(source, tmp_path / "c.json", limit=99)
    assert not (tmp_path / "c.json").exists()
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "none"):
        with pytest.raises(InputError):
            copy_plain(tmp_path / name, tmp_path / "d.json", limit=99)


# mutations


def mutated(raw: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """One bit flipped, one byte set, a piece cut out, a tail cut off, or bytes put in, before `end`."""
    data, place = bytearray(raw), rng.randrange(min(end or len(raw), len(raw)))
    kind = rng.randrange(5)
    if kind == 0:
        data[place] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[place] = rng.randrange(256)
    elif kind == 2:
        del data[place : place + rng.randrange(1, 9)]
    elif kind == 3:
        del data[place:]
    else:
        data[place:place] = rng.randbytes(rng.randrange(1, 9))
    return bytes(data)


def survives(read: Callable[[], object]) -> bool:
    """Whether `read` gave something; refusals are fine, anything else fails the test, and so does a second."""
    started = time.monotonic()
    try:
        read()
        is_read = True
    except SpecctlError as error:
        f"{error.message} {error.where} {error.hint}".encode()
        is_read = False
    assert time.monotonic() - started < 1
    return is_read


def whole(folder: Path) -> None:
    found = open_checkpoint(folder)
    repr(found.problems).encode()
    for entry in found.tensors.values():
        assert isinstance(entry, TensorEntry)
        read_array(entry)


def subjects(folder: Path) -> Iterator[tuple[Path, int | None]]:
    yield folder / "config.json", None
    yield folder / "model.safetensors.index.json", None
    for shard in ("a.safetensors", "b.safetensors"):
        (length,) = struct.unpack("<Q", (folder / shard).read_bytes()[:8])
        yield folder / shard, 8 + length


def test_no_mutated_checkpoint_raises_anything_but_ours(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"x": drawn("BF16", 3, 4), "y": drawn("F8_E4M3", 5)}}
    sharded(tmp_path, shards | {"b.safetensors": {"d2t": torch.arange(7), "t2d": drawn("BOOL", 9)}})
    (tmp_path / "config.json").write_text('{"a": {"b": [1, 2.5e3, null, true, "\\u00e9"]}, "c": "\u00e9"}')
    rng = random.Random(11)
    reads = 0
    for path, end in subjects(tmp_path):
        raw = path.read_bytes()
        for _ in range(100):
            path.write_bytes(mutated(raw, rng, end))
            reads += survives(lambda: whole(tmp_path))
        path.write_bytes(raw)
    assert reads > 300
    whole(tmp_path)

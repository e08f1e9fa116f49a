"""Files of `torch.save`: their tensors as torch reads them, and nothing of them ever run."""

import io
import json
import os
import pickle
import random
import struct
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_files import DTYPES, all_bytes, drawn, mutated, raw_bytes, survives

from specctl.errors import InputError, NotSupportedError, SpecctlError, UnsafeFile
from specctl.files.checkpoint import open_checkpoint
from specctl.files.tensors import TensorEntry, read_array
from specctl.files.torchzip import read_torch, read_torch_values

TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86\x89ccollections\nOrderedDict\n)RtR"
)
"""A [2, 3] float tensor in record 0, as torch writes it at protocol 2."""


def state(tensor: bytes = TENSOR) -> bytes:
    """The pickle of `{"w": tensor}`."""
    return b"\x80\x02}X\x01\x00\x00\x00w" + tensor + b"s."


def zipped(path: Path, data: bytes, records: dict[str, bytes] | None = None, **options: Any) -> Path:
    """A zip with a pickle and 24 bytes of data, laid out as torch does."""
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("a/data.pkl", data)
        for name, content in ({"a/byteorder": b"little", "a/data/0": bytes(24)} | (records or {})).items():
            archive.writestr(name, content)
    return path


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def refused(path: Path) -> SpecctlError:
    """The error of reading; it must come at once and be fit to print."""
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        read_torch(path)
    assert time.monotonic() - started < 1
    f"{caught.value.message} {caught.value.where} {caught.value.hint}".encode()
    assert len(caught.value.message) < 500
    return caught.value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_those_that_torch_saved(tmp_path: Path, protocol: int) -> None:
    tensors = {code: drawn(code, 3, 5, seed=n) for n, code in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4), "\u00e9": torch.ones(2)}
    tensors |= {"parameter": torch.nn.Parameter(torch.ones(3)), "rows": torch.arange(12.0).reshape(4, 3)[1:3]}
    path = saved(tmp_path / "x.bin", tensors, pickle_protocol=protocol)
    found = read_torch(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = found[name]
        assert (DTYPES[entry.dtype], entry.shape) == (tensor.dtype, tuple(tensor.shape))
        assert all_bytes(entry) == raw_bytes(tensor.detach())


def test_a_modules_state_dict_is_read_and_tied_tensors_share_bytes(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    values = module.state_dict()
    values["tied"] = values["0.weight"]
    found = read_torch(saved(tmp_path / "x.bin", values))
    assert list(found) == [*module.state_dict(), "tied"]
    assert found["tied"].begin == found["0.weight"].begin
    np.testing.assert_array_equal(read_array(found["0.weight"]), module[0].weight.detach().numpy())


def test_a_parameter_with_attributes_is_read(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = {"a": [1, 2]}  # type: ignore[attr-defined]
    assert read_torch(saved(tmp_path / "x.bin", {"p": parameter}))["p"].shape == (2,)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_a_trainers_checkpoint_is_read_one_level_down(tmp_path: Path, key: str) -> None:
    value = {"epoch": 3, key: OrderedDict(w=torch.ones(2)), "args": {"lr": 1e-3, "names": ("a", ["b"])}}
    assert read_torch(saved(tmp_path / "x.bin", value)).keys() == {"w"}


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_that_are_no_tensors_are_skipped(tmp_path: Path, protocol: int) -> None:
    value = {
        "w": torch.ones(2),
        "size": torch.Size([2]),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "big": 2**70,
        "bytes": b"ab",
        "set": {1, 2},
        3: torch.ones(1),
        (1, 2): 3,
        "none": None,
    }
    assert read_torch(saved(tmp_path / "x.bin", value, pickle_protocol=protocol)).keys() == {"w"}


def test_a_small_side_file_gives_its_numbers_and_tensors(tmp_path: Path) -> None:
    """The `eagle_meta.pt` that NeMo writes beside a draft. Source: NVIDIA-NeMo/Automodel#2447."""
    mask = torch.tensor([True, False, True])
    value = {"global_step": 7, "epoch": 1.5, "selected_token_ids": torch.tensor([0, 2]), "selected_token_mask": mask}
    value |= {"name": "eagle", "flag": True, "none": None, "list": [1]}
    found = read_torch_values(saved(tmp_path / "eagle_meta.pt", value))
    plain = {name: entry for name, entry in found.items() if not isinstance(entry, TensorEntry)}
    assert plain == {"global_step": 7, "epoch": 1.5, "name": "eagle", "flag": True, "none": None}
    ids, flags = found["selected_token_ids"], found["selected_token_mask"]
    assert isinstance(ids, TensorEntry) and isinstance(flags, TensorEntry)
    assert (read_array(ids).tolist(), read_array(flags).tolist()) == ([0, 2], [True, False, True])


def test_the_pickle_of_these_tests_is_one_of_torch(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.bin", state(), {"a/version": b"3"})
    assert torch.load(path, weights_only=True)["w"].shape == (2, 3)
    assert read_torch(path)["w"].shape == (2, 3)


@pytest.mark.parametrize(
    "tensor", [torch.arange(6.0).reshape(2, 3).T, torch.ones(1).expand(4), torch.arange(6.0)[::2]], ids=str
)
def test_a_tensor_that_is_not_contiguous_is_refused(tmp_path: Path, tensor: torch.Tensor) -> None:
    with pytest.raises(NotSupportedError) as caught:
        read_torch(saved(tmp_path / "x.bin", {"w": tensor}))
    assert "not contiguous" in caught.value.message
    assert "contiguous()" in str(caught.value.hint)


def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    assert "dtype" in refused(saved(tmp_path / "x.bin", {"w": torch.ones(1, dtype=torch.complex128)})).message


def test_files_of_the_old_format_and_strangers_are_refused_with_the_next_step(tmp_path: Path) -> None:
    old = saved(tmp_path / "old.bin", {"w": torch.ones(1)}, _use_new_zipfile_serialization=False)
    with pytest.raises(NotSupportedError, match=r"before 1\.6") as caught:
        read_torch(old)
    assert "save it again" in str(caught.value.hint)
    for raw in (b"", b"hello", bytes(100), b"PK", b"PK\x03\x04" + bytes(100)):
        (tmp_path / "x.bin").write_bytes(raw)
        message = refused(tmp_path / "x.bin").message
        assert "zip of `torch.save`" in message or "empty" in message
    (tmp_path / "x.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "Git LFS" in refused(tmp_path / "x.bin").message
    os.mkfifo(tmp_path / "pipe.bin")
    assert "a FIFO" in refused(tmp_path / "pipe.bin").message
    assert "no dict" in refused(saved(tmp_path / "x.bin", [torch.ones(1)])).message
    assert "no dict" in refused(saved(tmp_path / "x.bin", torch.ones(1))).message


# what would run code


class Runs:
    """An object whose pickle calls something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class Plain:
    pass


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "system"), (eval, "eval"), (getattr, "getattr"), (io.open, "open")]
)
def test_a_pickle_that_calls_a_function_is_unsafe_and_not_run(
    tmp_path: Path, function: Any, name: str, protocol: int
) -> None:
    arguments = {"system": "touch ran", "eval": "open('ran', 'w')", "open": "ran"}
    data = pickle.dumps({"w": Runs(function, str(tmp_path / "ran"), arguments.get(name, "x"))}, protocol)
    if protocol < 2:
        # Protocols 0 and 1 write opcodes that torch never does; what matters is that nothing is run.
        assert not (tmp_path / "ran").exists() and refused(zipped(tmp_path / "x.bin", data))
        return
    error = refused(zipped(tmp_path / "x.bin", data))
    assert isinstance(error, UnsafeFile) and error.exit_code == 2
    assert f".{name}`" in error.message and "safetensors" in str(error.hint)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.bin").rename(tmp_path / "pytorch_model.bin")
    assert [problem.rule for problem in open_checkpoint(tmp_path).problems] == ["WEIGHTS_UNSAFE"]


UNSAFE = {
    "an object": pickle.dumps({"w": Plain()}, 2),
    "a function of torch": b"\x80\x02}ctorch\nload\ns.",
    "a function of torch by another path": b"\x80\x02ctorch._utils\n_import_dotted_name\n.",
    "a dotted name": b"\x80\x04}\x8c\x05torch\x8c\x0dSize.__call__\x93s.",
    "a name with an escape": b"\x80\x02ctorch\nSi\\qze\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "STACK_GLOBAL of no strings": b"\x80\x04K\x01K\x02\x93.",
    "INST": b"(X\x04\x00\x00\x00trueios\nsystem\n.",
    "OBJ": b"(ctorch\nSize\nK\x01o.",
    "NEWOBJ": b"\x80\x02ctorch\nSize\n)\x81.",
    "NEWOBJ_EX": b"\x80\x04ctorch\nSize\n)}\x92.",
    "EXT1": b"\x80\x02\x82\x01.",
    "EXT2": b"\x80\x02\x83\x01\x00.",
    "PERSID": b"P/etc/passwd\n.",
    "REDUCE of a string": b"\x80\x02" + text("os.system") + b")R.",
    "REDUCE of a tensor": b"\x80\x02" + TENSOR + b")R.",
    "REDUCE of a result": b"\x80\x02ccollections\nOrderedDict\n)R)R.",
    "REDUCE with no tuple": b"\x80\x02ctorch\nSize\n]R.",
    "BUILD of a name": b"\x80\x02ctorch\nSize\n}b.",
    "BUILD of a list": b"\x80\x02]}b.",
    "BUILD of a storage": state(TENSOR).replace(b"tQ", b"tQ}b"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_every_way_to_code_is_unsafe(tmp_path: Path, name: str) -> None:
    error = refused(zipped(tmp_path / "x.bin", UNSAFE[name]))
    assert isinstance(error, UnsafeFile)
    assert error.message.startswith("loading it would run code: the pickle ")
    assert error.where == f"{tmp_path / 'x.bin'}, data.pkl"


def pair_of_pairs(depth: int) -> bytes:
    """A tuple that holds one tuple twice, and so on: its hash or its repr would take 2^depth steps."""
    return b"\x80\x02)q\x00" + b"".join(b"h\x00h\x00\x86q\x00" for _ in range(depth))


BROKEN = {
    "nothing": b"",
    "no end": b"\x80\x02}",
    "an empty stack": b"\x80\x02.",
    "no opcode": b"\x80\x02\xff.",
    "a mark that is none": b"\x80\x02t.",
    "a tuple of nothing": b"\x80\x02\x86.",
    "a memo that is none": b"\x80\x02h\x07.",
    "a memo that is far": b"\x80\x02j\xff\xff\xff\xff.",
    "text of 4 GB": b"\x80\x02X\xff\xff\xff\xffa.",
    "a long of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
    "a negative long": b"\x80\x02\x8b\xff\xff\xff\xff\x01.",
    "a name without end": b"\x80\x02ctorch\nSize",
    "a name of 2000 bytes": b"\x80\x02c" + b"t" * 2000 + b"\nSize\n.",
    "half a pair in a name": b"\x80\x02}X\x03\x00\x00\x00\xed\xa0\x80" + TENSOR + b"s.",
    "append to a tuple": b"\x80\x02)K\x01a.",
    "items of a list": b"\x80\x02]K\x01K\x02s.",
    "an odd number of items": b"\x80\x02}(K\x01u.",
    "decimal text": b"I" + b"9" * 6000 + b"\n.",
    "a persistent id of a path": state(TENSOR.replace(b"X\x01\x00\x00\x000", text("../../data.pkl"))),
    "a persistent id of another zip": state(TENSOR.replace(b"X\x01\x00\x00\x000", text("/etc/passwd"))),
    "a persistent id of Arabic digits": state(TENSOR.replace(b"X\x01\x00\x00\x000", text("\u0663"))),
    "a persistent id of a list": b"\x80\x02]Q.",
    "a persistent id of no storage": state(TENSOR.replace(b"FloatStorage", b"float32")),
    "a storage that is not there": state(TENSOR.replace(b"X\x01\x00\x00\x000", text("7"))),
    "an offset beyond": state(TENSOR.replace(b"QK\x00", b"QK\x01")),
    "an offset of 2^62": state(TENSOR.replace(b"QK\x00", b"Q\x8a\x08" + struct.pack("<q", 2**62))),
    "a negative offset": state(TENSOR.replace(b"QK\x00", b"QJ\xff\xff\xff\xff")),
    "an offset of True": state(TENSOR.replace(b"QK\x00", b"Q\x88")),
    "a shape beyond": state(TENSOR.replace(b"K\x02K\x03\x86K\x03", b"K\x03K\x03\x86K\x03")),
    "a negative shape": state(TENSOR.replace(b"K\x02K\x03\x86", b"J\xfe\xff\xff\xffK\x03\x86")),
    "a shape of text": state(TENSOR.replace(b"K\x02K\x03\x86", text("ab"))),
    "a shape of 2^62 x 4": state(
        TENSOR.replace(b"K\x02K\x03\x86K\x03", b"\x8a\x08" + struct.pack("<q", 2**62) + b"K\x04\x86K\x04")
    ),
    "more strides than dimensions": state(TENSOR.replace(b"K\x03K\x01\x86", b"K\x03K\x01K\x01\x87")),
    "65 dimensions": state(TENSOR.replace(b"K\x02K\x03\x86K\x03K\x01\x86", (b"(" + b"K\x01" * 65 + b"t") * 2)),
    "no arguments": state(b"ctorch._utils\n_rebuild_tensor_v2\n)R"),
    "no dtype": state(TENSOR.replace(b"_v2", b"_v3")),
    "a parameter of a number": state(b"ctorch._utils\n_rebuild_parameter\nK\x01\x85R"),
    "a dict of arguments": b"\x80\x02ccollections\nOrderedDict\n]\x85R.",
    "a call of a type": b"\x80\x02ctorch\nFloatStorage\n)R.",
    "a size of sizes": pair_of_pairs(60) + b"ctorch\nSize\nh\x00\x85R.",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_pickle_is_refused_at_once(tmp_path: Path, name: str) -> None:
    assert not isinstance(refused(zipped(tmp_path / "x.bin", BROKEN[name])), UnsafeFile)


def test_a_memo_index_of_two_to_the_31_costs_nothing(tmp_path: Path) -> None:
    data = state(TENSOR + b"r\xff\xff\xff\x7f")
    assert read_torch(zipped(tmp_path / "x.bin", data)).keys() == {"w"}


def test_values_that_contain_themselves_or_grow_by_reference_are_only_skipped(tmp_path: Path) -> None:
    itself = b"]q\x01h\x01a"
    tree = pair_of_pairs(60)[2:]
    data = b"\x80\x02}(" + text("a") + itself + text("b") + tree + tree + b"K\x01" + text("w") + TENSOR + b"u."
    assert read_torch(zipped(tmp_path / "x.bin", data)).keys() == {"w"}
    inner = b"\x80\x02}q\x01" + text("model") + b"h\x01s."
    assert read_torch(zipped(tmp_path / "x.bin", inner)) == {}


def test_nesting_without_end_ends(tmp_path: Path) -> None:
    for unit in (b"(", b"]", b"]a", b"}(", b"}K\x01"):
        path = zipped(tmp_path / "x.bin", b"\x80\x02]" + unit * 200_000 + b".")
        survives(lambda path=path: read_torch(path))  # type: ignore[misc]
    deep = b"\x80\x02}" + text("a") + b")" + b"\x85" * 200_000 + b"s."
    assert read_torch(zipped(tmp_path / "x.bin", deep)) == {}


def test_a_pickle_of_too_many_opcodes_is_refused(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match="more than 2000000 opcodes"):
        read_torch(zipped(tmp_path / "x.bin", b"\x80\x02" + b"\x80\x02" * 2_000_000))
    assert time.monotonic() - started < 10


# the archive


def test_what_is_not_stored_plainly_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    assert "compressed" in refused(zipped(path, state(), compression=zipfile.ZIP_DEFLATED)).message
    assert "byte order `big`" in refused(zipped(path, state(), {"a/byteorder": b"big"})).message
    assert "at most 16" in refused(zipped(path, state(), {"a/byteorder": b"l" * 1000})).message
    assert "found 2" in refused(zipped(path, state(), {"b/data.pkl": b""})).message
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", b"")
    assert "found 0" in refused(path).message


def test_a_compressed_storage_of_zeros_is_not_inflated(tmp_path: Path) -> None:
    zipped(tmp_path / "x.bin", state(), {"a/data/0": b""})
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("a/data.pkl", state())
        archive.writestr("a/data/0", bytes(50 << 20), compress_type=zipfile.ZIP_DEFLATED)
    assert "`data/0` is compressed" in refused(tmp_path / "x.bin").message


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.bin", state())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
    assert "one name" in refused(path).message


def test_a_record_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.bin", state())
    raw = path.read_bytes()
    sizes = struct.pack("<II", len(state()), len(state()))
    for claimed in (1 << 20, 0xFFFF_FFF0):
        path.write_bytes(raw.replace(sizes, struct.pack("<II", claimed, claimed)))
        assert "cut" in refused(path).message
    os.truncate(path, 5 << 30)
    refused(path)


def test_a_pickle_above_the_limit_is_not_read(tmp_path: Path) -> None:
    """A sparse gigabyte: a table of records at the end of a file that is otherwise a hole."""
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive, archive.open("a/data.pkl", "w", force_zip64=True) as file:
        for _ in range(65):
            file.write(bytes(1 << 20))
    assert "at most 67108864" in refused(tmp_path / "x.bin").message


def test_a_table_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    size = 3 << 30
    path.write_bytes(b"PK\x03\x04")
    os.truncate(path, size)
    with path.open("r+b") as file:
        file.seek(size)
        file.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 65535, 65535, size - 4, 4, 0))
    assert "at most 8388608" in refused(path).message


def test_names_in_the_archive_are_never_paths(tmp_path: Path) -> None:
    (tmp_path / "data.pkl").write_bytes(state())
    with zipfile.ZipFile(tmp_path / "x.bin", "w") as archive:
        archive.writestr("../data.pkl", state())
        archive.writestr("../data/0", bytes(24))
    assert read_torch(tmp_path / "x.bin")["w"].path == tmp_path / "x.bin"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.pkl", "x.bin"]


def test_no_mutated_file_raises_anything_but_ours_or_runs_anything(tmp_path: Path) -> None:
    """Flips, cuts and insertions all over the zip and then in the pickle alone."""
    value = OrderedDict(w=torch.ones(2, 3), p=torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)), n=3)
    path = saved(tmp_path / "pytorch_model.bin", value)
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "pytorch_model.bin.index.json"
    raw, rng = path.read_bytes(), random.Random(5)
    with zipfile.ZipFile(path) as archive:
        data = archive.read("pytorch_model/data.pkl")
    reads = 0
    for _ in range(150):
        path.write_bytes(mutated(raw, rng))
        reads += survives(lambda: [read_array(entry) for entry in read_torch(path).values()])
        survives(lambda: read_torch_values(path))
    for _ in range(250):
        zipped(path, mutated(data, rng), {"a/data/1": bytes(8)})
        reads += survives(lambda: [read_array(entry) for entry in read_torch(path).values()])
    assert 20 < reads < 380
    path.write_bytes(raw)
    index.write_text(json.dumps({"weight_map": {"w": path.name}}))
    assert open_checkpoint(tmp_path).tensors.keys() == {"w", "p"}

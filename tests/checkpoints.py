"""Checkpoints for tests: the broken and healthy fixtures, published heads as sparse files, and mutations."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import ROOT

from specctl.files.tensors import ITEM_BYTES
from specctl.recipes.check import check
from specctl.records.check import CheckConfig, CheckReport
from specctl.records.progress import SilentReporter

BROKEN = ROOT / "fixtures" / "broken"
HEALTHY = ROOT / "fixtures" / "healthy"
HEADERS = ROOT / "fixtures" / "headers"
TARGET = BROKEN / "target"


def config_of(draft: Path, options: list[str]) -> CheckConfig:
    """The config that `specctl check-ckpt` makes of `options`; a target is relative to the fixture's folder."""
    values: dict[str, Any] = {}
    words = iter(options)
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        values["layout" if name == "from" else name] = True if name == "deep" else next(words)
    if "target" in values:
        values["target"] = str((draft.parent / values["target"]).resolve())
    return CheckConfig(str(draft), **{**values, **({"pp": int(values["pp"])} if "pp" in values else {})})


def checked(draft: Path, *options: str) -> CheckReport:
    """A check in this process."""
    return check(config_of(draft, list(options)), SilentReporter())


def rules_broken(draft: Path, *options: str) -> list[str]:
    """The ids of the broken rules, sorted, each as often as it was found."""
    return sorted(finding.rule for finding in checked(draft, *options).findings)


def materialise(header: Path, folder: Path) -> dict[str, Any]:
    """A published head as a sparse safetensors file of its real size, with a map that makes sense."""
    record: dict[str, Any] = json.loads(header.read_text())
    info: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in record["tensors"].items():
        size = math.prod(shape) * ITEM_BYTES[dtype]
        info[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(info).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(record["config"]))
    vocab, drafted = record["config"].get("vocab_size"), record["config"].get("draft_vocab_size")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)
        start = 8 + len(raw)
        if "d2t" in info and drafted != vocab:
            file.seek(start + info["d2t"]["data_offsets"][0])
            file.write((1).to_bytes(8, "little") * info["d2t"]["shape"][0])
        if "t2d" in info:
            shape = info["t2d"]["shape"][0]
            count = info["d2t"]["shape"][0]
            file.seek(start + info["t2d"]["data_offsets"][0])
            file.write(b"\1" * shape if count == shape else b"\0" + b"\1" * count)
        if "mask_hidden" in info:
            file.seek(start + info["mask_hidden"]["data_offsets"][0])
            file.write(b"\1\2\3\4")
    return record


NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    10**30,
    -(10**30),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 70,
    "../../x",
    "\ud83d\ude00",
    "\x00",
    [],
    [None],
    [1, 2, 3],
    [[1]],
    ["a"],
    {},
    {"a": {"b": []}},
    [10**9] * 3,
    [-1, 2, 4],
    "\x1b]0;owned\x07\x1b[2J",
    "x\nPASS: this draft loads and works",
)

HUGE: tuple[Any, ...] = (2 * 10**8, 2**30, 2**31 - 1, 10**400, 10**4299 - 1, -(10**400), 1e-320, 5e307)
"""Numbers that are fine by themselves and too large to count up to, to allocate or to turn into a float."""

SIZES = (
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "target_hidden_size",
    "num_aux_hidden_states",
    "rope_theta",
    "factor",
    "max_position_embeddings",
    "rms_norm_eps",
    "mask_token_id",
    "eos_token_id",
    "num_draft_tokens",
)
LISTS = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "eos_token_id", "layer_types", "architectures")


def mutate(folder: Path, rng: random.Random, *, keeps_form: bool = False) -> str:
    """Damage one file of a checkpoint in one of many ways; says which.

    With `keeps_form` JSON and headers stay readable.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice(files)
    choices: list[Callable[[Path, random.Random], None]] = [_flip, _cut, _insert, _remove]
    if path.suffix == ".json":
        choices = [_json_value, _json_value, _json_huge, _json_huge, _json_key, _flip, _cut, _insert]
    elif path.suffix == ".safetensors":
        choices = [_header_value, _header_value, _header_value, _header_name, _flip_early, _cut, _flip, _length]
    if keeps_form:
        formal = (_json_value, _json_huge, _json_key, _header_value, _header_name)
        choices = [choice for choice in choices if choice in formal] or [_flip]
    choice = rng.choice(choices)
    choice(path, rng)
    return f"{choice.__name__} of {path.name}"


def _flip(path: Path, rng: random.Random, limit: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 4)):
        if data:
            data[rng.randrange(min(len(data), limit or len(data)))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _flip_early(path: Path, rng: random.Random) -> None:
    _flip(path, rng, 900)


def _cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def _insert(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    path.write_bytes(data[:at] + rng.randbytes(rng.randint(1, 20)) + data[at:])


def _remove(path: Path, _rng: random.Random) -> None:
    path.unlink()


def _length(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[:8] = rng.choice((0, 1, 2**63, 2**40, len(data), len(data) - 8)).to_bytes(8, "little")
    path.write_bytes(data)


def _json_value(path: Path, rng: random.Random) -> None:
    try:
        record = json.loads(path.read_bytes())
        _replace_one(record, rng)
    except ValueError:
        return _flip(path, rng)
    return _text(path, record)


def _replace_one(record: Any, rng: random.Random) -> None:
    while isinstance(record, (dict, list)) and record:
        keys: list[Any] = list(record) if isinstance(record, dict) else list(range(len(record)))
        key = rng.choice(keys)
        inner = record[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.6:
            record = inner
            continue
        record[key] = rng.choice(NASTY)
        return


def _json_huge(path: Path, rng: random.Random) -> None:
    """A huge number, or a list without end, under a key that readers count with."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return _flip(path, rng)
    if isinstance(record, dict):
        inner = record
        nested = [value for value in record.values() if isinstance(value, dict)]
        if nested and rng.random() < 0.4:
            inner = rng.choice(nested)
        if rng.random() < 0.75:
            present = [key for key in SIZES if key in inner]
            inner[rng.choice(present or SIZES)] = rng.choice(HUGE)
        else:
            inner[rng.choice(LISTS)] = rng.choice((list(range(50_000)), ["y" * 9] * 20_000, [10**400], [2**62, 2]))
    return _text(path, record)


def _json_key(path: Path, rng: random.Random) -> None:
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return _cut(path, rng)
    if isinstance(record, dict) and record:
        key = rng.choice(list(record))
        if rng.random() < 0.5:
            del record[key]
        else:
            record[rng.choice(list(record)) + rng.choice(("", "_", "\u00e9"))] = record.pop(key)
    return _text(path, record)


def _text(path: Path, record: Any) -> None:
    path.write_text(json.dumps(record))


def _header(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _with_header(path: Path, info: Any, body: bytes) -> None:
    raw = json.dumps(info).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def _header_value(path: Path, rng: random.Random) -> None:
    try:
        info, body = _header(path)
    except ValueError:
        return _flip(path, rng)
    name = rng.choice(list(info))
    entry = info[name]
    if isinstance(entry, dict) and "shape" in entry and rng.random() < 0.5:
        # Another shape or dtype of the same size: a header that is whole and means something else.
        size = math.prod(entry["shape"])
        entry["shape"] = rng.choice(([size], [1, size], [size, 1], [1, 1, size], [size, 0] if size == 0 else [size]))
        if rng.random() < 0.3 and entry["dtype"] == "BF16":
            entry["dtype"] = rng.choice(("F16", "I16", "U16"))
    else:
        _replace_one(info, rng)
    return _with_header(path, info, body)


def _header_name(path: Path, rng: random.Random) -> None:
    try:
        info, body = _header(path)
    except ValueError:
        return _cut(path, rng)
    name = rng.choice(list(info))
    new = rng.choice(
        (
            "",
            "model." * 50 + "x",
            "layers.99999999.x",
            "layers.-1.y",
            "layers.x.z",
            "midlayer.",
            "d2t",
            "t2d",
            "mask_hidden",
            "fc_norm.x.weight",
            "\x00",
            "../../etc/passwd",
            "layers.3.self_attn.q_proj.weight",
            "lm_head.weight",
            "a.bias",
            "evil\x1b]0;owned\x07\x9b2J\u202e",
            "rotary_emb.inv_freq",
            "z" * 5000,
        )
    )
    info[new] = info.pop(name)
    return _with_header(path, info, body)


def copy_of(folder: Path, to: Path) -> Path:
    """A fresh copy of a checkpoint."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to, symlinks=True)
    return to

"""What a shard folder or a target holds, and how two folders compare. Reads, never writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import plugins
from specctl.errors import InputError, SpecctlError
from specctl.records.progress import Reporter
from specctl.records.shard import MANIFEST, SHARDS, Manifest

if TYPE_CHECKING:
    from specctl.core.recompute import SlotMatch


@dataclass(frozen=True, slots=True)
class SlotStats:
    """Over all tokens read: mean of the row norms, root mean square, largest magnitude."""

    slot: str
    mean_norm: float
    rms: float
    max_abs: float


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample as text, cut into (text, is supervised) spans."""

    sample_id: str
    tokens: int
    supervised_tokens: int
    spans: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class FolderReport:
    """A shard folder. `sample` is None when no tokenizer is at hand to render it."""

    path: str
    target: str
    is_complete: bool
    dtype: str
    format: str
    slots: tuple[str, ...]
    shards: int
    samples: int
    tokens: int
    supervised_tokens: int
    bytes: int
    drops: Mapping[str, int]
    stats: tuple[SlotStats, ...]
    sample: SampleView | None


@dataclass(frozen=True, slots=True)
class TargetReport:
    """A target as its files describe it."""

    path: str
    architecture: str
    model_type: str
    text_config: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    quantization: str | None
    is_tied: bool
    weights_bytes: int
    aux: str
    bytes_per_token_per_slot: int
    chat_template: str


@dataclass(frozen=True, slots=True)
class CompareReport:
    """Two folders, sample by sample. `missing` counts samples that only one of them has; `is_near` says that no more
    than rounding of their dtype tells them apart, as of two programs that ran the same target.
    """

    path: str
    other: str
    samples: int
    missing: int
    slots: tuple[SlotMatch, ...]
    is_equal: bool
    is_near: bool


def inspect(
    path: str, reporter: Reporter, *, sample: int = 0, target: str | None = None, trust_remote_code: bool = False
) -> FolderReport | TargetReport:
    """Describe `path`. Raises InputError when it is neither a shard folder nor a target."""
    folder = Path(path)
    if (folder / MANIFEST).exists():
        return _folder(folder, reporter, sample=sample, target=target, trust=trust_remote_code)
    if (folder / SHARDS).is_dir():
        raise InputError(f"the folder has `{SHARDS}/` but no `{MANIFEST}`", where=path)
    if folder.is_dir() and not (folder / "config.json").exists() and not list(folder.glob("*.gguf")):
        raise InputError(
            f"the folder has neither `config.json` nor a GGUF file, as targets do, nor `{MANIFEST}`, as shards do",
            where=path,
        )
    return _target(path, trust_remote_code)


def compare(path: str, other: str, reporter: Reporter) -> CompareReport:
    """Compare what two folders store, whatever their containers and order of samples.

    Raises InputError when their slots or dtypes differ.
    """
    from specctl.core.folder import read_manifest

    left, right = read_manifest(Path(path)), read_manifest(Path(other))
    for key in ("slots", "dtype", "hidden_size"):
        if left.settings[key] != right.settings[key]:
            raise InputError(
                f"the folders cannot be compared: `{key}` is {left.settings[key]} and {right.settings[key]}",
                where=f"{path} and {other}",
            )
    return _compare(Path(path), left, Path(other), right, reporter)


def _compare(path: Path, left: Manifest, other: Path, right: Manifest, reporter: Reporter) -> CompareReport:
    import numpy as np

    from specctl.core.recompute import match, to_torch, worse

    dtype = str(left.settings["dtype"])
    places = dict(_places(other, right))
    worst: dict[str, SlotMatch] = {}
    samples = missing = 0
    opened: tuple[str, Any] = ("", None)
    reporter.start("comparing", sum(e.tokens for e in left.shards), "tokens")
    for key, (file, rows) in _places(path, left):
        if key not in places:
            missing += 1
            continue
        samples += 1
        other_file, other_rows = places.pop(key)
        if opened[0] != f"{file}|{other_file}":
            shards = (_open(path, left, file), _open(other, right, other_file))
            opened = (f"{file}|{other_file}", [{s: shard.slot(s) for s in left.slots} for shard in shards])
        mine, theirs = opened[1]
        for slot in left.slots:
            a, b = mine[slot][rows], theirs[slot][other_rows]
            if slot not in worst or not np.array_equal(a, b):
                worst[slot] = worse(worst.get(slot), match(slot, to_torch(a, dtype), to_torch(b, dtype)))
        reporter.advance(rows.stop - rows.start)
    reporter.stop()
    matches = tuple(worst[s] for s in left.slots if s in worst)
    is_whole = bool(samples) and not missing and not places
    is_equal = is_whole and all(m.is_equal for m in matches)
    is_near = is_whole and all(m.is_near(dtype) for m in matches)
    return CompareReport(str(path), str(other), samples, missing + len(places), matches, is_equal, is_near)


def _places(folder: Path, manifest: Manifest) -> Any:
    """(sample key, (file, rows)) of every sample."""
    from specctl.records.sample import Sample

    for entry in manifest.shards:
        if not entry.rows:
            continue
        shard = _open(folder, manifest, entry.file)
        offsets, ids, mask = shard.offsets(), shard.input_ids(), shard.loss_mask()
        for i, name in enumerate(shard.sample_ids):
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            yield Sample(name, ids[rows], mask[rows], "").key(), (entry.file, rows)


def _open(folder: Path, manifest: Manifest, file: str) -> plugins.ShardReader:
    entry = next(e for e in manifest.shards if e.file == file)
    return plugins.load_store(manifest.settings["format"]).open_shard(folder / SHARDS / file, entry)


def _folder(folder: Path, reporter: Reporter, *, sample: int, target: str | None, trust: bool) -> FolderReport:
    from specctl.core.folder import read_manifest

    manifest = read_manifest(folder)
    entries = [e for e in manifest.shards if e.rows]
    return FolderReport(
        path=str(folder),
        target=str(manifest.provenance.get("target")),
        is_complete=manifest.is_complete,
        dtype=manifest.settings["dtype"],
        format=manifest.settings["format"],
        slots=manifest.slots,
        shards=len(manifest.shards),
        samples=sum(e.rows for e in entries),
        tokens=sum(e.tokens for e in entries),
        supervised_tokens=sum(e.supervised_tokens for e in entries),
        bytes=sum(e.bytes for e in entries),
        drops=manifest.drops,
        stats=_stats(folder, manifest, reporter),
        sample=_render(folder, manifest, sample, target, reporter, trust=trust) if entries else None,
    )


def _stats(folder: Path, manifest: Manifest, reporter: Reporter) -> tuple[SlotStats, ...]:
    import numpy as np

    from specctl.core.recompute import to_torch

    dtype = str(manifest.settings["dtype"])
    entries = [e for e in manifest.shards if e.rows]
    sums = {slot: np.zeros(3) for slot in manifest.slots}
    rows = sum(e.tokens for e in entries)
    reporter.start("reading", rows, "tokens")
    for entry in entries:
        shard = _open(folder, manifest, entry.file)
        for slot in manifest.slots:
            states = shard.slot(slot)
            for start in range(0, len(states), 4096):
                block = to_torch(states[start : start + 4096], dtype).double()
                square = block.square().sum(-1)
                sums[slot] += (float(square.sqrt().sum()), float(square.sum()), 0.0)
                sums[slot][2] = max(sums[slot][2], float(block.abs().max()))
        reporter.advance(entry.tokens)
    reporter.stop()
    size = int(manifest.settings["hidden_size"])
    return tuple(
        SlotStats(slot, total / rows, (square / (rows * size)) ** 0.5, largest)
        for slot, (total, square, largest) in sums.items()
        if rows
    )


def _render(
    folder: Path, manifest: Manifest, index: int, target: str | None, reporter: Reporter, *, trust: bool
) -> SampleView | None:
    """Sample `index` of the folder, decoded with the target's tokenizer when that can be loaded."""
    from specctl.core.target import describe_target, load_tokenizer

    total = sum(e.rows for e in manifest.shards)
    if not 0 <= index < total:
        raise InputError(f"there is no sample {index}; the folder has 0..{total - 1}", where=str(folder))
    for entry in manifest.shards:
        if index < entry.rows:
            break
        index -= entry.rows
    shard = _open(folder, manifest, entry.file)
    offsets = shard.offsets()
    rows = slice(int(offsets[index]), int(offsets[index + 1]))
    ids, mask = shard.input_ids()[rows].tolist(), shard.loss_mask()[rows].tolist()
    name = target or str(manifest.provenance.get("target"))
    try:
        spec = describe_target(name, is_whole=False, trust_remote_code=trust)
        tokenizer = load_tokenizer(spec, trust_remote_code=trust)
    except SpecctlError as error:
        reporter.note(f"no sample is shown, the target's tokenizer is not at hand: {error.message}")
        return None
    spans: list[tuple[str, bool]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            spans.append((tokenizer.decode(ids[start:end], skip_special_tokens=False), bool(mask[start])))
            start = end
    return SampleView(shard.sample_ids[index], len(ids), sum(mask), tuple(spans))


def _target(path: str, trust: bool) -> TargetReport:
    from specctl.core.target import describe_target, load_tokenizer
    from specctl.records.layers import aux_boundaries
    from specctl.records.shard import ITEM_BYTES

    spec = describe_target(path, trust_remote_code=trust)
    try:
        aux = ", ".join(map(str, aux_boundaries(spec.num_layers)))
    except SpecctlError:
        aux = "too shallow"
    try:
        template = "yes" if load_tokenizer(spec, trust_remote_code=trust).chat_template else "no"
    except SpecctlError:
        template = "no tokenizer"
    fields: dict[str, Any] = {k: v for k, v in asdict(spec).items() if k in TargetReport.__dataclass_fields__}
    return TargetReport(
        **fields,
        text_config=spec.text_prefix or "flat",
        dtype=spec.compute_dtype,
        aux=aux,
        bytes_per_token_per_slot=spec.hidden_size * ITEM_BYTES[spec.compute_dtype],
        chat_template=template,
    )

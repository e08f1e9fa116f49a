"""What was done to each tensor and key of a converted draft. Knows two checkpoints, no layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Written
from specctl.files.tensors import Gather, Source, Table, TensorEntry


@dataclass(frozen=True, slots=True)
class Changed:
    """A key of config.json, dotted where nested; None where it is null or not there."""

    key: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Traced:
    """A tensor of the output: which one it is, `file: name`, and what was done to it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    change: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor of the source that the output does not have."""

    name: str
    reason: str


def traced(name: str, written: Written, checkpoint: Checkpoint) -> Traced:
    """Where tensor `name` of the output comes from."""
    source, canonical = written.tensors[name], written.canonical.get(name, name)
    entry, change = _origin(source, canonical, checkpoint)
    place = f"{entry.path.name}: {entry.name}" if entry is not None else "-"
    return Traced(name, source.dtype, tuple(source.shape), place, change)


def _origin(source: Source, canonical: str, checkpoint: Checkpoint) -> tuple[TensorEntry | None, str]:
    """The tensor that the bytes come from, and in words what was done."""
    if isinstance(source, Gather):
        return source.entry, "rows sorted" if source.axis == 0 else "blocks sorted"
    if isinstance(source, TensorEntry):
        kept = checkpoint.tensors.get(source.name)
        if kept is None or (kept.path, kept.begin) != (source.path, source.begin):
            return source, "from the target"
        is_moved = "fc_norm." in canonical and canonical.split(".")[-2] != source.name.split(".")[-2]
        if is_moved and not source.name.startswith("aux_norm_"):
            return source, "blocks sorted"
        return source, "as it is" if source.shape == kept.shape else "reshaped"
    return _table_origin(source, canonical, checkpoint)


def _table_origin(table: Table, canonical: str, checkpoint: Checkpoint) -> tuple[TensorEntry | None, str]:
    """A table in memory is a small tensor in another order or type, or made from the map of ids."""
    ending = f".{canonical}"
    found = next((e for name, e in checkpoint.tensors.items() if f".{name}".endswith(ending)), None)
    if canonical not in ("d2t", "t2d"):
        return found, "blocks sorted"
    if _is_whole(table, canonical, checkpoint):
        return None, "made: the whole vocabulary"
    if canonical == "t2d":
        return found, "made bool" if found is not None else "made from d2t"
    if found is None:
        return None, "made from eagle_meta.pt"
    return found, "rows sorted" if found.dtype == table.dtype else f"{found.dtype} to int64"


def _is_whole(table: Table, canonical: str, checkpoint: Checkpoint) -> bool:
    """Whether a map stands for every token, as some layouts have it."""
    if canonical == "t2d":
        return table.data.count(1) == len(table.data)
    return table.shape == (_vocabulary(checkpoint.config),)


def _vocabulary(config: Mapping[str, Any]) -> Any:
    nested = config.get("transformer_layer_config")
    return nested.get("vocab_size") if isinstance(nested, Mapping) else config.get("vocab_size")


def dropped(checkpoint: Checkpoint, written: Written) -> Iterator[Dropped]:
    """The tensors of the source that no tensor of the output comes from."""
    used = set()
    for name, source in written.tensors.items():
        entry, _ = _origin(source, written.canonical.get(name, name), checkpoint)
        used |= {entry.name} if entry is not None else set()
    for name in sorted(checkpoint.tensors.keys() - used):
        yield Dropped(name, _reason(name))


def _reason(name: str) -> str:
    last = name.split(".")[-1]
    if "rotary_emb" in name:
        return "a buffer that readers make themselves"
    if "embed_tokens" in name:
        return "equal to the target's, which readers take"
    if "hidden_norm" in name:
        return "not used above the first layer"
    return {"d2t": "the vocabulary is whole", "t2d": "follows from d2t, or the vocabulary is whole"}.get(
        last, "not needed"
    )


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Changed]:
    """The keys that differ, those of nested objects dotted."""
    old, new = dict(_flat(before)), dict(_flat(after))
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            yield Changed(key, old.get(key), new.get(key))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value and prefix.count(".") < 8:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

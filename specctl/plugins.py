"""The seams: Protocols of plug-in modules, and finding them by file name.

A plug-in is a module in one of the folders below; its file name is its registration. Listing names
reads the folder and imports nothing.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, cast

import specctl
from specctl.errors import UsageError
from specctl.records.shard import ShardEntry, ShardLayout, SlotArray

Kind = Literal["stores", "formats", "drafts", "engines"]


class ShardReader(Protocol):
    """One open shard; arrays are read-only and may be memory-mapped."""

    layout: ShardLayout
    sample_ids: Sequence[str]

    def offsets(self) -> "Any":
        """int64 [S+1]: sample i is rows offsets[i]:offsets[i+1]."""

    def input_ids(self) -> "Any":
        """int32 [T]."""

    def loss_mask(self) -> "Any":
        """uint8 [T]."""

    def slot(self, slot: str, rows: slice | None = None) -> "Any":
        """The states of one slot, [T, D], in `layout.dtype` (bfloat16 as its uint16 bits)."""


class Store(Protocol):
    """One shard container. Source: docs/design.md, Shards."""

    SUFFIX: str
    COMPRESSIONS: tuple[str, ...]
    IS_RANDOM_ACCESS: bool
    """Several processes may write their slots into one file at once."""

    def write(
        self, path: Path, layout: ShardLayout, small: Mapping[str, SlotArray], slots: Mapping[str, SlotArray]
    ) -> None:
        """Write a whole shard to `path` and sync it."""

    def open_shard(self, path: Path, entry: ShardEntry | None = None) -> ShardReader:
        """Open a shard, checking its size and structure. Raises ShardError."""


def names(kind: Kind) -> tuple[str, ...]:
    """The plug-ins of one kind, sorted."""
    folder = Path(specctl.__file__).parent / kind
    return tuple(sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_")))


def load(kind: Kind, name: str) -> ModuleType:
    """The plug-in module called `name`. Raises UsageError with the names there are."""
    if name not in names(kind):
        raise UsageError(f"no {kind[:-1]} is called `{name}`", hint=f"there are: {', '.join(names(kind))}")
    return importlib.import_module(f"specctl.{kind}.{name}")


def load_store(name: str) -> Store:
    """The shard container called `name`."""
    return cast(Store, load("stores", name))

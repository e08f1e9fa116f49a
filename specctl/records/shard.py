"""The shard folder's contract: manifest, entries, layout. Frozen data, JSON in and out, no torch.

Source: docs/design.md, Shards.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specctl.errors import ShardError
from specctl.records.layers import NORM

FORMAT_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SHARDS: Final = "shards"

SlotArray = NDArray[Any]

ITEM_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4}
NUMPY_DTYPE: Final[Mapping[str, Any]] = {
    "bfloat16": np.uint16,  # numpy has no bfloat16: its bits
    "float16": np.float16,
    "float32": np.float32,
}


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """What one shard holds: S samples of T tokens in all, and per slot [T, hidden_size] of `dtype`."""

    num_samples: int
    num_tokens: int
    hidden_size: int
    dtype: str
    slots: tuple[str, ...]
    compression: str = "none"

    def slot_bytes(self) -> int:
        """Bytes of one slot, uncompressed."""
        return self.num_tokens * self.hidden_size * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard as the manifest lists it.

    `checksum` is the file's SHA-256; `planned` identifies the samples it was made from, dropped ones
    included. A shard whose samples were all dropped has no file, no rows and no bytes.
    """

    file: str
    rows: int
    tokens: int
    supervised_tokens: int
    bytes: int
    checksum: str
    planned: str = ""


@dataclass(frozen=True, slots=True)
class DroppedSample:
    """A sample that was refused after its states were seen. `key` is its identity, in hexadecimal."""

    sample_id: str
    reason: str
    shard: str
    key: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was asked of a run, and what is there.

    `settings` decide what a state means: a run that differs in one refuses to continue the folder.
    `provenance` says what made it (versions, names) and may differ between runs.
    `drops` counts refused rows by reason, `dropped_samples` names those refused for their states.
    """

    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    shards: Sequence[ShardEntry] = ()
    drops: Mapping[str, int] = field(default_factory=dict)
    dropped_samples: Sequence[DroppedSample] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    is_complete: bool = False
    format_version: int = FORMAT_VERSION

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots every shard holds."""
        return tuple(self.settings["slots"])

    def to_json(self) -> str:
        """The file's text: sorted keys, so that equal manifests are equal bytes."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def manifest_from_json(text: str, where: str) -> Manifest:
    """The manifest in `text`. Raises ShardError when it is none, or of another version."""
    try:
        data = json.loads(text)
        version = data["format_version"]
        if version != FORMAT_VERSION:
            raise ShardError(
                f"`{MANIFEST}` has format version {version}; this specctl reads {FORMAT_VERSION}",
                where=where,
                hint="extract again, or use the specctl that wrote it",
            )
        data["shards"] = tuple(ShardEntry(**entry) for entry in data["shards"])
        data["dropped_samples"] = tuple(DroppedSample(**drop) for drop in data["dropped_samples"])
        manifest = Manifest(**data)
        for key in ("slots", "dtype", "hidden_size", "final_norm_applied", "format"):
            if key not in manifest.settings:
                raise KeyError(f"settings.{key}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ShardError(
            f"`{MANIFEST}` is not a manifest of specctl: {error}",
            where=where,
            hint="is this the folder that `specctl extract --out` wrote?",
        ) from error
    return manifest


def final_norm_applied(slots: Sequence[str]) -> dict[str, bool]:
    """Per slot, whether the target's final norm was applied to what is stored."""
    return {slot: slot == NORM for slot in slots}


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per setting that differs, `key: old -> new`, sorted."""
    keys = sorted(set(old) | set(new))
    return [f"{k}: {old.get(k)!r} -> {new.get(k)!r}" for k in keys if old.get(k) != new.get(k)]

"""The samples of shard folders as one list: which there are, which are held out, and their arrays.

Shards stay mapped; only what a sample needs is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from specctl import plugins
from specctl.core.folder import read_manifest
from specctl.core.recompute import to_torch
from specctl.errors import ShardError, UsageError
from specctl.plugins import ShardReader
from specctl.records.layers import NORM
from specctl.records.shard import SHARDS, Manifest

OPEN_SHARDS = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample lies: tokens begin:end of a shard of a folder."""

    folder: int
    shard: int
    begin: int
    end: int
    sample_id: str

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: ids int64 [T], loss_mask uint8 [T], aux [T, A*D] and final [T, D] as stored."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor


class Corpus:
    """All samples of some folders of `specctl extract` that have the same target and slots.

    With `final_norm` the teacher's states are made from the last boundary, for folders without slot `norm`.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        boundaries: Sequence[int],
        *,
        final_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.folders = tuple(folders)
        self.manifests = tuple(complete_manifest(folder) for folder in folders)
        self._slots = tuple(map(str, boundaries))
        self._final_norm = final_norm
        self._final = NORM if final_norm is None else last_of(self.manifests[0])
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            _require_slots(folder, manifest, (*self._slots, self._final))
            _require_same(folder, manifest, self.manifests[0])
        self._reader = lru_cache(maxsize=OPEN_SHARDS)(self._open)
        self.places = tuple(self._places())

    def sample(self, place: Place) -> Sample:
        """The arrays of one sample, copied out of the map. Raises ShardError for a damaged shard."""
        reader = self._reader(place.folder, place.shard)
        rows = slice(place.begin, place.end)
        states = [to_torch(reader.slot(slot, rows), reader.layout.dtype) for slot in (*self._slots, self._final)]
        final = states[-1] if self._final_norm is None else self._final_norm(states[-1])
        return Sample(
            torch.from_numpy(reader.input_ids()[rows].astype(np.int64)),
            torch.from_numpy(reader.loss_mask()[rows].copy()),
            torch.cat(states[:-1], dim=-1),
            final,
        )

    def teaches(self, place: Place) -> bool:
        """Whether a sample has a supervised token that a draft is scored on: none before its third."""
        reader = self._reader(place.folder, place.shard)
        return bool(reader.loss_mask()[place.begin + 2 : place.end].any())

    def _open(self, folder: int, shard: int) -> ShardReader:
        manifest = self.manifests[folder]
        entry = manifest.shards[shard]
        store = plugins.load_store(manifest.settings["format"])
        return store.open_shard(self.folders[folder] / SHARDS / entry.file, entry)

    def _places(self) -> list[Place]:
        places = []
        for number, manifest in enumerate(self.manifests):
            for shard, entry in enumerate(manifest.shards):
                if not entry.rows:
                    continue
                reader = self._open(number, shard)
                bounds = reader.offsets().tolist()
                ids = reader.sample_ids
                places += [Place(number, shard, bounds[i], bounds[i + 1], ids[i]) for i in range(entry.rows)]
        return places


def complete_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder. Raises ShardError for an unfinished one."""
    manifest = read_manifest(folder)
    if not manifest.is_complete:
        raise ShardError(
            "the shard folder is unfinished", where=str(folder), hint="run its `specctl extract` again to the end"
        )
    return manifest


def last_of(manifest: Manifest) -> str:
    """The slot of the last boundary."""
    return str(int(manifest.settings["num_layers"]))


def needs_final_norm(manifest: Manifest) -> bool:
    """Whether the teacher's states have to be made from the last boundary."""
    return NORM not in manifest.slots and last_of(manifest) in manifest.slots


def is_held_out(sample_id: str, fraction: float, seed: int) -> bool:
    """Whether a sample is kept for evaluation: by its id alone, so that more data moves none across."""
    digest = hashlib.sha256(f"{seed}\0{sample_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def boundaries_of(manifest: Manifest, folder: Path, wanted: str | None) -> tuple[int, ...]:
    """The boundary ids to train on: those named in `wanted`, else every stored one.

    Raises UsageError for an id that is not stored.
    """
    stored = tuple(int(slot) for slot in manifest.slots if slot != NORM)
    if wanted is None:
        if not stored:
            raise UsageError("the shards hold no layer to read", hint="extract again with `--layers aux,norm`")
        return stored
    from specctl.records.layers import parse_slots

    asked = tuple(int(slot) for slot in parse_slots(wanted, int(manifest.settings["num_layers"])) if slot != NORM)
    missing = sorted(set(asked) - set(stored))
    if missing or not asked:
        raise UsageError(
            f"`--layers {wanted}` asks for boundary {missing[0] if missing else 'nothing'}; "
            f"the shards hold {', '.join(map(str, stored))}",
            hint=f"extract again with `--layers {wanted},norm`",
        )
    return asked


def _require_slots(folder: Path, manifest: Manifest, slots: Sequence[str]) -> None:
    missing = [slot for slot in slots if slot not in manifest.slots]
    if missing:
        raise ShardError(
            f"the shards have no slot `{missing[0]}`; they have {', '.join(manifest.slots)}",
            where=str(folder),
            hint="extract again with `--layers aux,norm`: training reads the layers and the normed final state",
        )


def _require_same(folder: Path, manifest: Manifest, first: Manifest) -> None:
    for key in ("target_weights", "tokenizer", "chat_template", "hidden_size", "vocab_size"):
        if manifest.settings.get(key) != first.settings.get(key):
            raise ShardError(f"the shard folders differ in `{key}`: they are of different targets", where=str(folder))

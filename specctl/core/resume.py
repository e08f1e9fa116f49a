"""Which shards a run still has to make, given those that are there. Knows plans and manifests, no target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl import plugins
from specctl.core.plan import PlannedShard, order, plan_shards
from specctl.core.samples import Spool
from specctl.records.sample import Sample
from specctl.records.shard import ITEM_BYTES, SHARDS, Manifest


@dataclass(frozen=True, slots=True)
class Remaining:
    """What a run has to do in a folder, and what is in it.

    `shards` are to be made; `kept` shards of `done_tokens` tokens are there. The run asks for `asked` samples.
    The folder holds `stale` samples that DATA has not, `renewed` of them with an id that DATA gives to another
    content.
    """

    shards: list[PlannedShard]
    done_tokens: int
    kept: int
    asked: int
    stale: int = 0
    renewed: int = 0


def remaining_shards(
    spool: Spool,
    manifest: Manifest,
    *,
    folder: Path,
    shard_tokens: int,
    seed: int,
    limit: int | None,
) -> Remaining:
    """What is left to make.

    When every listed shard is one of the plan, the holes of the plan are filled. Otherwise (DATA, the
    seed or the shard size changed) the samples that no shard holds are planned anew behind the last.
    """
    indices = order(spool, seed)[:limit]
    planned = plan_shards(spool, indices, shard_tokens=shard_tokens)
    listed = {entry.planned: entry for entry in manifest.shards}
    by_print = {shard.fingerprint: shard for shard in planned}
    done_tokens = sum(entry.tokens for entry in manifest.shards)
    if all(p in by_print and int(Path(e.file).stem) == by_print[p].number for p, e in listed.items()):
        todo = [s for s in planned if s.fingerprint not in listed]
        return Remaining(todo, done_tokens, len(listed), len(indices))
    held = dict(_held(folder, manifest))
    # Samples refused for their states are known too: they would be refused again.
    known = held.keys() | {bytes.fromhex(drop.key) for drop in manifest.dropped_samples}
    rest = np.array([i for i in indices.tolist() if spool.keys[i].tobytes() not in known], np.int64)
    first = 1 + max(int(Path(e.file).stem) for e in manifest.shards)
    todo = plan_shards(spool, rest, shard_tokens=shard_tokens, first_number=first)
    there = {key.tobytes() for key in spool.keys}
    stale = [name for key, name in held.items() if key not in there]
    names = {spool.sample_id(i) for i in range(len(spool))} if stale else set()
    renewed = sum(name in names for name in stale)
    return Remaining(todo, done_tokens, len(listed), len(indices), len(stale), renewed)


def _held(folder: Path, manifest: Manifest) -> Iterator[tuple[bytes, str]]:
    """Key and id of every sample that the folder's shards hold."""
    store = plugins.load_store(manifest.settings["format"])
    for entry in manifest.shards:
        if not entry.rows:
            continue
        shard = store.open_shard(folder / SHARDS / entry.file, entry)
        offsets, ids, mask = shard.offsets(), shard.input_ids(), shard.loss_mask()
        for i, name in enumerate(shard.sample_ids):
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            yield Sample(name, ids[rows], mask[rows], "").key(), name


def bytes_per_token(settings: Mapping[str, Any]) -> int:
    """Bytes that one token takes in all slots, uncompressed."""
    return int(settings["hidden_size"]) * ITEM_BYTES[str(settings["dtype"])] * len(settings["slots"])

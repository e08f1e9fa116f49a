"""Ends a run: the manifest is sealed, and how often each token occurs is written beside it.

Counted from the shards themselves, so that a resumed run counts what is there and not what it did.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specctl import plugins
from specctl.core import folder as folders
from specctl.core.samples import SpoolReport
from specctl.errors import DataError
from specctl.records.shard import SHARDS, Manifest


def count_tokens(folder: Path, manifest: Manifest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 [V] counts of all tokens and of supervised tokens."""
    vocab_size = int(manifest.settings["vocab_size"])
    store = plugins.load_store(manifest.settings["format"])
    total, supervised = np.zeros((2, vocab_size), np.int64)
    for entry in manifest.shards:
        if not entry.rows:
            continue
        shard = store.open_shard(folder / SHARDS / entry.file, entry)
        ids = shard.input_ids()
        total += np.bincount(ids, minlength=vocab_size)
        supervised += np.bincount(ids[shard.loss_mask() == 1], minlength=vocab_size)
    return total, supervised


def write_token_counts(folder: Path, manifest: Manifest) -> None:
    """Write `token_counts.safetensors` with `total` and `supervised`. Raises OSError."""
    from safetensors.numpy import save

    total, supervised = count_tokens(folder, manifest)
    folders.write_atomic(folder / folders.TOKEN_COUNTS, save({"total": total, "supervised": supervised}))


def seal(out: Path, read: SpoolReport) -> None:
    """Mark the manifest complete, with the counts that a reader wants, and write the token counts.

    Raises DataError when every sample was dropped for its states, MachineError when the disk refuses.
    """
    manifest = folders.read_manifest(out)
    samples = sum(entry.rows for entry in manifest.shards)
    if not samples:
        first = manifest.dropped_samples[0]
        raise DataError(f"all samples were dropped: `{first.sample_id}` had {first.reason}", where=str(out))
    counts = {
        "rows": read.rows,
        "samples": samples,
        "tokens": sum(entry.tokens for entry in manifest.shards),
        "supervised_tokens": sum(entry.supervised_tokens for entry in manifest.shards),
        "truncated": read.truncated,
    }
    drops = dict(read.drops) | ({"non_finite": len(manifest.dropped_samples)} if manifest.dropped_samples else {})
    try:
        write_token_counts(out, manifest)
        folders.write_manifest(out, replace(manifest, counts=counts, drops=drops, is_complete=True))
        (out / folders.MANIFEST_LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise folders.cannot_write(out, error) from error

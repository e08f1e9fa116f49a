"""How often each token occurs in a shard folder: what a draft vocabulary is chosen by.

Counted from the shards themselves, so that a resumed run counts what is there and not what it did.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specctl import plugins
from specctl.core.folder import TOKEN_COUNTS, write_atomic
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
    write_atomic(folder / TOKEN_COUNTS, save({"total": total, "supervised": supervised}))

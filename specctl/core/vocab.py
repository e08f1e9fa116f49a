"""The draft's vocabulary: the target's tokens that its own text uses most, and always those that end it.

Source: docs/design.md, Conventions; vllm-project/speculators `vocab_mapping.py` for the rule, ties by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specctl.core.folder import TOKEN_COUNTS
from specctl.errors import InputError, ShardError, UsageError
from specctl.files.safetensors import read_header
from specctl.files.tensors import read_array


def supervised_counts(folders: Sequence[Path], weights: Sequence[float], *, vocab_size: int) -> torch.Tensor:
    """float64 [vocab_size]: how often each token is supervised in all folders. Raises ShardError."""
    total = torch.zeros(vocab_size, dtype=torch.float64)
    for folder, weight in zip(folders, weights, strict=True):
        total += token_counts(folder, "supervised", vocab_size=vocab_size).double() * weight
    return total


def token_counts(folder: Path, name: str, *, vocab_size: int) -> torch.Tensor:
    """int64 [vocab_size]: the `total` or `supervised` counts of a shard folder. Raises ShardError."""
    path = folder / TOKEN_COUNTS
    if not path.is_file():
        raise ShardError(
            f"the folder has no `{TOKEN_COUNTS}`, which the draft's vocabulary and reserved token rest on",
            where=str(folder),
            hint="finish its `specctl extract`, which counts tokens at its end",
        )
    try:
        entry = read_header(path)[0].get(name)
    except InputError as error:
        raise ShardError(f"the token counts cannot be read: {error.message}", where=str(path)) from error
    if entry is None or (entry.dtype, entry.shape) != ("I64", (vocab_size,)):
        found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise ShardError(
            f"the token counts `{name}` are {found}; the target's vocabulary asks for I64 [{vocab_size}]",
            where=str(path),
            hint="name the target that the shards were extracted from, or extract again",
        )
    return torch.from_numpy(read_array(entry).copy())


def choose_vocabulary(counts: torch.Tensor, size: int, always: Sequence[int]) -> torch.Tensor:
    """int64 [size], rising: `always`, then the most frequent ids, then the lowest unused ones.

    Raises UsageError when `size` is not from 1 to V or does not hold `always`.
    """
    vocab = counts.shape[0]
    if not 0 < size <= vocab:
        raise UsageError(f"`--draft-vocab-size {size}` is not from 1 to the target's {vocab}")
    needed = sorted({token for token in always if 0 <= token < vocab})
    if len(needed) > size:
        raise UsageError(f"`--draft-vocab-size {size}` does not hold the {len(needed)} tokens that end a text")
    rank = counts.clone()
    rank[needed] = torch.inf
    # A stable sort of the negated counts breaks ties by id, also among the tokens that never occur.
    chosen = torch.argsort(-rank, stable=True)[:size]
    return chosen.sort().values


def coverage(counts: torch.Tensor, vocabulary: torch.Tensor) -> float:
    """The share of supervised tokens that the draft can propose."""
    return float(counts[vocabulary].sum() / counts.sum().clamp_min(1))

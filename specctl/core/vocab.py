"""The draft's vocabulary: the target's tokens that its own text uses most, and always those that end it.

Source: docs/design.md, Conventions; vllm-project/speculators `vocab_mapping.py` for the rule, ties by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specctl.core.folder import TOKEN_COUNTS
from specctl.errors import ShardError, UsageError
from specctl.files.safetensors import read_header
from specctl.files.tensors import read_array


def supervised_counts(folders: Sequence[Path], weights: Sequence[float]) -> torch.Tensor:
    """float64 [V]: how often each token is supervised in all folders. Raises ShardError."""
    total: torch.Tensor | None = None
    for folder, weight in zip(folders, weights, strict=True):
        path = folder / TOKEN_COUNTS
        if not path.is_file():
            raise ShardError(
                "the folder has no token counts, so no draft vocabulary can be made",
                where=str(folder),
                hint="finish its `specctl extract`, or train over the whole vocabulary",
            )
        counts = torch.from_numpy(read_array(read_header(path)[0]["supervised"]).astype("float64")) * weight
        if total is not None and total.shape != counts.shape:
            raise ShardError("the shard folders have targets of different vocabularies", where=str(folder))
        total = counts if total is None else total + counts
    assert total is not None
    return total


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

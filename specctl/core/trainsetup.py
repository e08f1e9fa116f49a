"""What a training run is made of, settled the same way on every rank: corpus, head, vocabulary, length.

Raises before anything is trained for whatever does not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl import plugins
from specctl.core import headmaking
from specctl.core.corpus import Corpus, Place, boundaries_of, complete_manifest, is_held_out, needs_final_norm
from specctl.core.device import DTYPES, is_gpu
from specctl.core.finalnorm import read_final_norm
from specctl.core.packing import epoch_order, rows_per_epoch
from specctl.core.teaching import TargetParts, read_parts
from specctl.core.training import Task
from specctl.core.trainlog import require_sink
from specctl.core.vocab import choose_vocabulary, coverage, supervised_counts, token_counts
from specctl.errors import DataError, InputError, UsageError
from specctl.files.jsonfile import read_json
from specctl.records.draft import DraftSettings
from specctl.records.head import HeadConfig
from specctl.records.training import TrainConfig

DEFAULT_LR = 1e-3
DEFAULT_DECAY = 0.6
TOKENIZER_BYTES = 64 << 20
DEFAULT_EPOCHS = 1.0
FEW_HELD_OUT = 4
LEAST_COVERAGE = 0.95


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank trains with."""

    task: Task
    parts: TargetParts
    head: HeadConfig
    vocabulary: torch.Tensor | None


def prepare(config: TrainConfig, device: torch.device) -> Ready:
    """The corpus, the target's parts, the head's settings and the vocabulary of a run.

    Raises UsageError, ShardError or TargetError for what does not fit together.
    """
    require_sink(config.log)
    folders = [Path(folder) for folder in config.shards]
    first = complete_manifest(folders[0])
    boundaries = boundaries_of(first, folders[0], config.layers)
    parts = read_parts(config.target, config.revision)
    final_norm = None
    if needs_final_norm(first):
        final_norm = read_final_norm(parts, trust_remote_code=config.trust_remote_code)
    corpus = Corpus(folders, boundaries, final_norm=final_norm)
    _require_target(parts, corpus)
    settings = draft_settings(config)
    head, vocabulary = head_and_vocabulary(config, parts, boundaries, settings.num_draft_tokens)
    if config.parallel_drafting:
        require_reserved(config, parts, folders)
    held: list[Place] = []
    kept: list[Place] = []
    for place in corpus.places:
        (held if is_held_out(place.sample_id, config.eval_fraction, 0) else kept).append(place)
    if not kept:
        raise DataError("no sample is left to train on", where=config.shards[0], hint="lower `--eval-fraction`")
    weights = config.weights or (1.0,) * len(folders)
    _require_lessons(corpus, kept, weights)
    total_rows, total_steps = lengths(config, kept, weights)
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if is_gpu(device) else "float32"
    task = Task(
        algorithm=plugins.load("drafts", "peagle" if config.parallel_drafting else "eagle3"),
        settings=settings,
        config=config,
        corpus=corpus,
        training=kept,
        held_out=held,
        weights=weights,
        total_steps=total_steps,
        total_rows=total_rows,
        lr=config.lr or DEFAULT_LR,
        compute_dtype=DTYPES[dtype],
        device=device,
    )
    return Ready(task, parts, head, vocabulary)


def doubts(ready: Ready, config: TrainConfig) -> list[str]:
    """What will train, and will hardly be what was meant."""
    found, task = [], ready.task
    if 0 < len(task.held_out) < FEW_HELD_OUT or (config.eval_fraction and not task.held_out):
        found.append(
            f"{len(task.held_out)} of {len(task.held_out) + len(task.training)} samples are held out: their score "
            "will say little; `--eval-fraction` holds out more"
        )
    if ready.vocabulary is not None and config.init_from is None:
        folders = [Path(folder) for folder in config.shards]
        counts = supervised_counts(folders, task.weights, vocab_size=ready.head.vocab_size)
        share = coverage(counts, ready.vocabulary)
        if share < LEAST_COVERAGE:
            found.append(
                f"a draft vocabulary of {len(ready.vocabulary)} tokens holds {share:.1%} of what the target said, and "
                "no other token can be guessed; `--draft-vocab-size` makes it larger"
            )
    return found


def draft_settings(config: TrainConfig) -> DraftSettings:
    """The algorithm's settings, with the defaults of docs/defaults.md."""
    tokens = config.num_draft_tokens or (4 if config.parallel_drafting else 3)
    decay = config.depth_decay if config.depth_decay is not None else DEFAULT_DECAY
    return DraftSettings(
        num_draft_tokens=tokens,
        depth_decay=decay,
        loss=config.loss,  # type: ignore[arg-type]
        cod_ratio=config.cod_ratio,
        cod_floor=config.cod_floor,
        num_segments=config.segments,
        checkpoint_layers=config.checkpoint_layers,
    )


def head_and_vocabulary(
    config: TrainConfig, parts: TargetParts, boundaries: tuple[int, ...], num_draft_tokens: int
) -> tuple[HeadConfig, torch.Tensor | None]:
    """The head's settings and int64 [W] target ids, None for the whole vocabulary."""
    head = headmaking.fresh_head(config, parts, boundaries, num_draft_tokens)
    if not head.is_reduced:
        return head, None
    folders = [Path(folder) for folder in config.shards]
    weights = config.weights or (1.0,) * len(folders)
    counts = supervised_counts(folders, weights, vocab_size=head.vocab_size)
    always = [*parts.files.facts.eos_token_ids]
    return head, choose_vocabulary(counts, head.draft_vocab_size, always)


def require_reserved(config: TrainConfig, parts: TargetParts, folders: list[Path]) -> None:
    """Refuse a reserved token that is missing, out of range, an end of text, or in the data.

    Raises UsageError, ShardError without token counts. Source: NVIDIA-NeMo/Automodel#2376.
    """
    token, facts = config.ptd_token_id, parts.files.facts
    counts = sum(token_counts(folder, "total", vocab_size=facts.vocab_size) for folder in folders)
    assert isinstance(counts, torch.Tensor)
    free = [i for i in special_ids(Path(facts.folder)) if i < len(counts) and not counts[i]]
    free = [i for i in free if i not in facts.eos_token_ids]
    hint = "choose an id of the vocabulary that never occurs in text, as an unused or padding row"
    hint += f"; special tokens that these shards do not hold: {', '.join(map(str, free[-4:]))}" if free else ""
    if token is None:
        raise UsageError(
            "`--parallel-drafting` needs `--ptd-token-id`, the reserved token of slots that are not known yet",
            hint=hint,
        )
    if not 0 <= token < facts.vocab_size:
        raise UsageError(f"`--ptd-token-id {token}` is not in the target's vocabulary, 0 to {facts.vocab_size - 1}")
    if token in facts.eos_token_ids:
        raise UsageError(f"`--ptd-token-id {token}` ends the target's texts", hint=hint)
    if int(counts[token]):
        raise UsageError(
            f"`--ptd-token-id {token}` occurs {int(counts[token])} times in the training data",
            where=", ".join(map(str, folders)),
            hint=hint,
        )


def special_ids(folder: Path) -> list[int]:
    """The ids that a tokenizer marks as special, which no text makes; none where its file does not say."""
    try:
        data, _ = read_json(folder / "tokenizer.json", TOKENIZER_BYTES)
    except InputError:
        return []
    added = data.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return sorted(entry["id"] for entry in entries if entry.get("special") is True and type(entry.get("id")) is int)


def lengths(config: TrainConfig, places: Any, weights: tuple[float, ...]) -> tuple[int, int]:
    """Rows and optimizer steps of the whole run."""
    if config.max_steps is not None:
        return config.max_steps * config.accumulate, config.max_steps
    per_epoch = rows_per_epoch(places, config.batch_tokens, seed=config.seed, weights=weights)
    rows = max(1, round(per_epoch * (config.epochs if config.epochs is not None else DEFAULT_EPOCHS)))
    return rows, math.ceil(rows / config.accumulate)


def _require_lessons(corpus: Corpus, kept: Sequence[Place], weights: tuple[float, ...]) -> None:
    """Raises DataError where an epoch would have no sample, or no sample anything to learn from."""
    if not epoch_order(kept, epoch=0, seed=0, weights=weights):
        raise DataError(f"the `weights` {list(weights)} take no sample of {len(kept)}", hint="raise them")
    # The first sample answers in nearly every folder.
    if not any(corpus.teaches(place) for place in kept if weights[place.folder]):
        raise DataError(
            "no sample has a supervised token from its third on, and a draft can be scored on no other",
            where=str(corpus.folders[0]),
        )


def _require_target(parts: TargetParts, corpus: Corpus) -> None:
    facts, settings = parts.files.facts, corpus.manifests[0].settings
    for key, found in (
        ("hidden_size", facts.hidden_size),
        ("vocab_size", facts.vocab_size),
        ("num_layers", facts.num_layers),
    ):
        if settings.get(key) != found:
            raise UsageError(
                f"the shards are of a target whose {key} is {settings.get(key)}; `--target` has {found}",
                where=str(corpus.folders[0]),
                hint="name the target that the shards were extracted from",
            )
    if settings.get("target_weights") != parts.fingerprint:
        raise UsageError(
            "the target's weights are not those that the states were made with",
            where=facts.folder,
            hint=f"the shards were made from `{corpus.manifests[0].provenance.get('target')}`",
        )

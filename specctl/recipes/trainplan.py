"""What a training run would be, before it is one: steps, parameters, memory, disk. Writes nothing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any, Final

from specctl.recipes.train import refuse, refuse_uneven
from specctl.recipes.trainfolder import refuse_folder, settings_of
from specctl.records.head import HeadConfig, required_shapes
from specctl.records.progress import Reporter
from specctl.records.training import TrainConfig, TrainPlan

KEPT_PER_ELEMENT: Final = 26
"""Numbers of width H that one layer keeps of an element for the backward pass, read off its modules:
norms and projections 10, attention 4, MLP 12 at the usual width."""

KEPT_AT_CHECKPOINT: Final = 2
"""What a layer keeps instead where it is computed again in backward: its input, keys and values."""


def plan_training(config: TrainConfig, reporter: Reporter) -> TrainPlan:
    """The plan of `config`. Raises what the run itself would raise before its first step."""
    from specctl.core.device import pick_device
    from specctl.core.trainsetup import prepare
    from specctl.core.vocab import coverage, supervised_counts

    refuse(config)
    refuse_uneven(config, config.nproc)
    refuse_folder(config, settings_of(config), reporter)
    reporter.note("reading the shards' lists of samples")
    ready = prepare(config, pick_device("cpu"))
    task = ready.task
    head, vocabulary, trains_embedding = _made_of(config, ready)
    embedding = head.vocab_size * head.hidden_size
    others = _count(head)
    frozen_head = 0 if config.train_head else head.draft_vocab_size * head.hidden_size
    trained = others - frozen_head + embedding * trains_embedding
    share = 1.0
    if vocabulary is not None:
        folders = [Path(folder) for folder in config.shards]
        share = coverage(supervised_counts(folders, task.weights, vocab_size=head.vocab_size), vocabulary)
    state = 4 * (others + embedding) + 8 * trained
    served = (4 if head.dtype == "float32" else 2) * (others + embedding * trains_embedding)
    return TrainPlan(
        steps=task.total_steps,
        rows=task.total_rows,
        samples=len(task.training),
        held_out=len(task.held_out),
        tokens=sum(map(len, task.training)),
        parameters=others + embedding,
        trained_parameters=trained,
        draft_vocab_size=head.draft_vocab_size,
        coverage=share,
        layers=tuple(head.aux_ids or ()),
        # Alone, an embedding's gradient is the rows that occurred.
        memory_bytes=_model_bytes(config, others + embedding, trained)
        - (4 * embedding if trains_embedding and config.nproc == 1 else 0)
        + _teacher_bytes(head, task.compute_dtype.itemsize)
        + _activation_bytes(config, head, task.settings.num_draft_tokens, task.compute_dtype.itemsize),
        disk_bytes=config.keep * state + served,
        free_bytes=shutil.disk_usage(_existing(Path(config.out))).free,
    )


def _made_of(config: TrainConfig, ready: Any) -> tuple[HeadConfig, Any, bool]:
    """The draft's settings, its vocabulary, and whether its embedding is trained; those of `init_from` where given."""
    from specctl.core.headmaking import trains_embedding
    from specctl.core.trainrun import first_model

    if config.init_from is None:
        return ready.head, ready.vocabulary, trains_embedding(config, ready.head)
    model = first_model(ready, config)
    return model.head, model.vocabulary(), model.embed_tokens.weight.requires_grad


def _count(head: HeadConfig) -> int:
    """Parameters without the embedding and the map."""
    shapes = {**required_shapes(head), "lm_head.weight": (head.draft_vocab_size, head.hidden_size)}
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "d2t")


def _model_bytes(config: TrainConfig, parameters: int, trained: int) -> int:
    """Weights, gradients and moments; of a shared model a share, and the weights gathered for each pass."""
    whole = 4 * parameters + 12 * trained
    ranks = config.nproc if config.fsdp else 1
    return whole if ranks == 1 else whole // ranks + 4 * parameters


def _teacher_bytes(head: HeadConfig, item: int) -> int:
    return head.draft_vocab_size * head.target_hidden_size * item


def _activation_bytes(config: TrainConfig, head: HeadConfig, depths: int, item: int) -> int:
    """Kept for backward: linear in the elements of a row, all of them at depth 0 and their share beyond.

    Checkpointed layers keep little and are computed again one at a time, segments likewise.
    """
    shares = [max(config.cod_ratio**d, config.cod_floor) if config.parallel_drafting else 1.0 for d in range(depths)]
    layers, beyond = head.num_hidden_layers, sum(shares[1:])
    kept = KEPT_AT_CHECKPOINT * (layers + 1) if config.checkpoint_layers else KEPT_PER_ELEMENT * layers
    segment = beyond / config.segments if config.parallel_drafting else 1.0
    again = max(1.0, segment) * KEPT_PER_ELEMENT if config.checkpoint_layers else 0.0
    held = kept * (1.0 + beyond) if config.segments == 1 else kept * (1.0 + segment) + beyond
    states = (head.fc_width + head.target_hidden_size) * 4
    return int(config.batch_tokens * ((held + again) * head.hidden_size * item + states))


def _existing(path: Path) -> Path:
    """The nearest folder that is there, on whose disk the run would write."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path

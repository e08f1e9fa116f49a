"""What a training run would be, before it is one: steps, parameters, memory, disk. Writes nothing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Final

from specctl.recipes.train import refuse
from specctl.records.head import HeadConfig, required_shapes
from specctl.records.progress import Reporter
from specctl.records.training import TrainConfig, TrainPlan

KEPT_PER_ELEMENT: Final = 26
"""Numbers of width H that one layer keeps of an element for the backward pass, read off its modules:
norms and projections 10, attention 4, MLP 12 at the usual width."""


def plan_training(config: TrainConfig, reporter: Reporter) -> TrainPlan:
    """The plan of `config`. Raises what the run itself would raise before its first step."""
    from specctl.core.device import pick_device
    from specctl.core.headmaking import trains_embedding
    from specctl.core.trainsetup import prepare
    from specctl.core.vocab import coverage, supervised_counts

    refuse(config)
    reporter.note("reading the shards' lists of samples")
    ready = prepare(config, pick_device("cpu"))
    head, task = ready.head, ready.task
    embedding = head.vocab_size * head.hidden_size
    others = _count(head)
    frozen_head = 0 if config.train_head else head.draft_vocab_size * head.hidden_size
    trained = others - frozen_head + embedding * trains_embedding(config, head)
    share = 1.0
    if ready.vocabulary is not None:
        folders = [Path(folder) for folder in config.shards]
        share = coverage(supervised_counts(folders, task.weights, vocab_size=head.vocab_size), ready.vocabulary)
    state = 4 * (others + embedding) + 8 * trained
    served = 2 * (others + embedding * trains_embedding(config, head))
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
        memory_bytes=4 * (others + embedding)
        + 12 * trained
        + _teacher_bytes(head, task.compute_dtype.itemsize)
        + _activation_bytes(config, head, task.settings.num_draft_tokens),
        disk_bytes=config.keep * state + served,
        free_bytes=shutil.disk_usage(_existing(Path(config.out))).free,
    )


def _count(head: HeadConfig) -> int:
    """Parameters without the embedding and the map."""
    shapes = {**required_shapes(head), "lm_head.weight": (head.draft_vocab_size, head.hidden_size)}
    return sum(math.prod(shape) for name, shape in shapes.items() if name != "d2t")


def _teacher_bytes(head: HeadConfig, item: int) -> int:
    return head.draft_vocab_size * head.target_hidden_size * item


def _activation_bytes(config: TrainConfig, head: HeadConfig, depths: int) -> int:
    """Kept for backward: linear in the elements of a row, all of them at depth 0 and their share beyond."""
    shares = [max(config.cod_ratio**d, config.cod_floor) if config.parallel_drafting else 1.0 for d in range(depths)]
    elements = config.batch_tokens * sum(shares)
    states = config.batch_tokens * (head.fc_width + head.target_hidden_size) * 4
    return int(elements * KEPT_PER_ELEMENT * head.hidden_size * head.num_hidden_layers * 4 + states)


def _existing(path: Path) -> Path:
    """The nearest folder that is there, on whose disk the run would write."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path

"""The training loop of one rank: rows in, gradients summed over ranks, one optimizer step after the other.

The loss of a step is the sum over all scored elements of all its rows, on all ranks, over the sum of
their weights; so rows, accumulation and ranks cut the work and change no number but by rounding.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType

import torch

from specctl.core.corpus import Corpus, Place
from specctl.core.losses import Teacher
from specctl.core.modules import DraftModel
from specctl.core.optimizer import apply_gradients, gradients_of
from specctl.core.packing import Row, training_rows
from specctl.core.replicas import Replicas
from specctl.core.rowloader import GreedyTokens, Loaded, loaded_ahead, moved
from specctl.core.trainstate import Progress
from specctl.errors import DataError, UsageError
from specctl.records.draft import DraftBatch, DraftSettings, LossReport
from specctl.records.training import TrainConfig

BAD_SAMPLES_BEFORE_THE_LIMIT = 8
"""A share of a few samples means nothing."""

SKIPPED_BEFORE_THE_END = 5
"""Steps in a row without a finite gradient, after which no later one will have one."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a run trains and on what, the same on every rank."""

    algorithm: ModuleType
    settings: DraftSettings
    config: TrainConfig
    corpus: Corpus
    training: Sequence[Place]
    held_out: Sequence[Place]
    weights: Sequence[float]
    total_steps: int
    total_rows: int
    lr: float
    compute_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step: mean loss in nats, gradient norm before clipping, learning rate."""

    progress: Progress
    loss: float
    grad_norm: float
    lr: float


@dataclass
class Trainer:
    """A model, its optimizer and its place in the data; `steps` moves them on."""

    task: Task
    model: DraftModel
    teacher: Teacher
    optimizer: torch.optim.AdamW
    replicas: Replicas
    progress: Progress = field(default_factory=Progress)

    def steps(self) -> Iterator[StepReport]:
        """One report after each optimizer step, from the current progress to the last.

        Raises DataError when more samples are bad than `max_bad_samples` allows, UsageError when the
        gradients stay without a finite value.
        """
        greedy = GreedyTokens(self.teacher)
        local = (row for window in step_windows(self.task, self.progress.rows) for row in self._mine(window))
        loaded = loaded_ahead(self.task.corpus, local, greedy)
        try:
            for window in step_windows(self.task, self.progress.rows):
                began = time.monotonic()
                report = self._step([next(loaded) for _ in self._mine(window)], len(window), began)
                self._refuse_bad_data()
                self._refuse_divergence(report)
                yield report
        finally:
            loaded.close()  # type: ignore[attr-defined]

    def _mine(self, window: Sequence[Row]) -> Sequence[Row]:
        return window[self.replicas.rank :: self.replicas.size]

    def _step(self, rows: Sequence[Loaded], num_rows: int, began: float) -> StepReport:
        totals = torch.zeros(6, dtype=torch.float64)
        for loaded in rows:
            totals += self._row(loaded)
        for _ in range(self._idle_rounds(num_rows) - len(rows)):
            self._backward(None, 0)
        self.replicas.sum([totals])
        loss, weight, tokens, supervised, samples, bad = totals.tolist()
        lr = learning_rate(self.task, self.progress.step)
        norm = self._update(weight, lr)
        done = self.progress
        mean = loss / weight if weight else done.loss
        self.progress = Progress(
            step=done.step + 1,
            rows=done.rows + num_rows,
            tokens=done.tokens + int(tokens),
            supervised=done.supervised + int(supervised),
            samples=done.samples + int(samples),
            bad_samples=done.bad_samples + int(bad),
            seconds=done.seconds + time.monotonic() - began,
            loss=mean,
            skipped=0 if math.isfinite(norm) else done.skipped + 1,
        )
        return StepReport(self.progress, mean, norm, lr)

    def _idle_rounds(self, num_rows: int) -> int:
        """How often every rank of a shared model runs in a step; 0 where ranks need not wait for each other."""
        return -(-num_rows // self.replicas.size) if self.replicas.is_sharded else 0

    def _row(self, loaded: Loaded) -> torch.Tensor:
        """float64 [6]: loss, weight, tokens, supervised, samples, bad samples; its gradients are added."""
        report = self._backward(loaded.batch, loaded.row.number)
        sums = (0.0, 0.0) if report is None else (float(report.loss.detach()), float(report.weight))
        sizes = (0.0, 0.0, 0.0) if loaded.batch is None else _sizes(loaded.batch)
        return torch.tensor([*sums, *sizes, loaded.bad], dtype=torch.float64)

    def _backward(self, batch: DraftBatch | None, number: int) -> LossReport | None:
        """The report of a row, None for no row; the gradients of its loss are added to the model's."""
        if batch is None and not self.replicas.is_sharded:
            return None
        generator = row_generator(self.task.config.seed, number)
        moved_batch = None if batch is None else moved(batch, self.task.device)

        def forward(model: DraftModel) -> tuple[torch.Tensor | None, LossReport | None]:
            report = None
            if moved_batch is not None:
                report = self.task.algorithm.training_loss(
                    model, moved_batch, teacher=self.teacher, settings=self.task.settings, generator=generator
                )
            if report is not None and float(report.weight):
                return report.loss, report
            return (nothing(model) if self.replicas.is_sharded else None), report

        with autocast(self.task):
            loss, report = self.model(forward)
        if loss is not None:
            loss.backward()
        assert report is None or isinstance(report, LossReport)
        return report

    def _update(self, weight: float, lr: float) -> float:
        gradients = gradients_of(p for p in self.model.parameters() if p.requires_grad)
        self.replicas.sum_gradients(gradients)
        norm = self.replicas.norm(gradients) / weight if weight else 0.0
        if not weight or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return norm
        # To the mean and within the clip in one pass.
        torch._foreach_mul_(gradients, min(1.0, self.task.config.clip / (norm + 1e-6)) / weight)
        apply_gradients(self.optimizer, lr)
        return norm

    def _refuse_bad_data(self) -> None:
        bad, good = self.progress.bad_samples, self.progress.samples
        limit = self.task.config.max_bad_samples
        is_over = bad > BAD_SAMPLES_BEFORE_THE_LIMIT and bad > limit * (bad + good)
        if is_over or (bad > good and self.progress.step == self.task.total_steps):
            raise DataError(
                f"{bad} of {bad + good} samples hold states that are not finite; the limit is {limit:.2%}",
                hint="`specctl extract --verify` finds what is wrong with the shards",
            )

    def _refuse_divergence(self, report: StepReport) -> None:
        done = report.progress
        is_lost = done.step == self.task.total_steps and done.skipped and not math.isfinite(done.loss)
        if done.skipped >= SKIPPED_BEFORE_THE_END or is_lost:
            raise UsageError(
                f"no gradient of the last {done.skipped} steps, up to step {done.step}, is finite",
                where=self.task.config.out,
                hint="lower `--lr` or `clip`; `--resume` goes on from the last checkpoint, which is finite",
            )


def step_windows(task: Task, skip: int) -> Iterator[list[Row]]:
    """The rows of each step from row `skip` on; the last window may be a part."""
    config = task.config
    rows = training_rows(task.training, config.batch_tokens, seed=config.seed, weights=task.weights, skip=skip)
    rows = itertools.islice(rows, max(0, task.total_rows - skip))
    while window := list(itertools.islice(rows, config.accumulate)):
        yield window


def learning_rate(task: Task, step: int) -> float:
    """The rate of a step: linear warm-up, then cosine, linear or constant to `min_lr` of the peak."""
    config, total = task.config, max(task.total_steps, 1)
    warm = config.warmup * total if config.warmup < 1 else config.warmup
    if step < warm:
        return task.lr * (step + 1) / (math.floor(warm) + 1)
    if config.schedule == "constant":
        return task.lr
    done = min(1.0, (step - warm) / max(total - warm, 1))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done
    return task.lr * (config.min_lr + (1 - config.min_lr) * shape)


def row_generator(seed: int, number: int) -> torch.Generator:
    """The random numbers of a row, whoever takes it."""
    digest = hashlib.sha256(f"{seed}\0{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def autocast(task: Task) -> AbstractContextManager[object]:
    """Mixed precision over fp32 masters, where the run computes in less."""
    if task.compute_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(task.device.type, dtype=task.compute_dtype)


def nothing(model: DraftModel) -> torch.Tensor:
    """A loss of 0 that reaches every trained parameter, for a rank that joins without a row."""
    return torch.stack([p.sum() * 0.0 for p in model.parameters() if p.requires_grad]).sum()


def _sizes(batch: DraftBatch) -> tuple[float, float, float]:
    """Tokens, supervised tokens and samples of a batch."""
    return float(batch.input_ids.shape[0]), float(batch.loss_mask.bool().sum()), float(len(batch.offsets) - 1)

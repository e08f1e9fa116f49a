"""The training loop of one rank: rows in, gradients summed over ranks, one optimizer step after the other.

The loss of a step is the sum over all scored elements of all its rows, on all ranks, over the sum of
their weights; so rows, accumulation and ranks cut the work and change no number but by rounding.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from specctl.core.corpus import Corpus, Place
from specctl.core.losses import Teacher
from specctl.core.modules import DraftModel
from specctl.core.packing import pack, training_rows
from specctl.core.parallel import Replicas
from specctl.core.rowloader import GreedyTokens, Loaded, load_row, loaded_ahead, moved
from specctl.core.trainstate import Progress
from specctl.errors import DataError
from specctl.records.draft import DraftBatch, DraftSettings, LossReport
from specctl.records.training import DepthScore, Evaluation, TrainConfig

BAD_SAMPLES_BEFORE_THE_LIMIT = 8
"""A share of a few samples means nothing."""


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
    optimizer: torch.optim.Optimizer
    replicas: Replicas
    progress: Progress = field(default_factory=Progress)

    def steps(self) -> Iterator[StepReport]:
        """One report after each optimizer step, from the current progress to the last.

        Raises DataError when more samples are bad than `max_bad_samples` allows.
        """
        greedy = GreedyTokens(self.teacher)
        windows = step_windows(self.task, self.progress.rows)
        local = (row for window in windows for row in window[self.replicas.rank :: self.replicas.size])
        loaded = loaded_ahead(self.task.corpus, local, greedy)
        try:
            for window in step_windows(self.task, self.progress.rows):
                began = time.monotonic()
                mine = len(window[self.replicas.rank :: self.replicas.size])
                report = self._step([next(loaded) for _ in range(mine)], len(window), began)
                yield report
        finally:
            loaded.close()  # type: ignore[attr-defined]

    def _step(self, rows: Sequence[Loaded], num_rows: int, began: float) -> StepReport:
        totals = torch.zeros(6, dtype=torch.float64)
        for loaded in rows:
            totals[5] += loaded.bad
            if loaded.batch is None:
                continue
            report = self._backward(loaded.batch, loaded.row.number)
            totals += torch.tensor(
                [float(report.loss.detach()), float(report.weight), *_sizes(loaded.batch), 0.0], dtype=torch.float64
            )
        self.replicas.sum([totals])
        loss, weight, tokens, supervised, samples, bad = totals.tolist()
        lr = learning_rate(self.task, self.progress.step)
        norm = self._update(weight, lr)
        done = self.progress
        self.progress = Progress(
            step=done.step + 1,
            rows=done.rows + num_rows,
            tokens=done.tokens + int(tokens),
            supervised=done.supervised + int(supervised),
            samples=done.samples + int(samples),
            bad_samples=done.bad_samples + int(bad),
            seconds=done.seconds + time.monotonic() - began,
        )
        self._refuse_bad_data()
        return StepReport(self.progress, loss / weight if weight else math.nan, norm, lr)

    def _backward(self, batch: DraftBatch, number: int) -> LossReport:
        generator = row_generator(self.task.config.seed, number)
        batch = moved(batch, self.task.device)
        with autocast(self.task):
            report = self.model(
                lambda model: self.task.algorithm.training_loss(
                    model, batch, teacher=self.teacher, settings=self.task.settings, generator=generator
                )
            )
        assert isinstance(report, LossReport)
        if float(report.weight):
            report.loss.backward()  # type: ignore[no-untyped-call]
        return report

    def _update(self, weight: float, lr: float) -> float:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.replicas.sum(gradients)
        if not weight:
            self.optimizer.zero_grad(set_to_none=True)
            return 0.0
        torch._foreach_mul_(gradients, 1.0 / weight)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.task.config.clip))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _refuse_bad_data(self) -> None:
        bad, good = self.progress.bad_samples, self.progress.samples
        limit = self.task.config.max_bad_samples
        if bad > BAD_SAMPLES_BEFORE_THE_LIMIT and bad > limit * (bad + good):
            raise DataError(
                f"{bad} of {bad + good} samples hold states that are not finite; the limit is {limit:.2%}",
                hint="`specctl extract --verify` finds what is wrong with the shards",
            )


def step_windows(task: Task, skip: int) -> Iterator[list]:  # type: ignore[type-arg]
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


@torch.no_grad()
def evaluate(
    task: Task, model: DraftModel, teacher: Teacher, step: int, *, greedy: GreedyTokens | None = None
) -> Evaluation | None:
    """The held-out score over at most `eval_rows` rows; None without held-out samples.

    P-EAGLE's depths are all scored, none left out by chance.
    """
    settings = replace(task.settings, cod_ratio=1.0, cod_floor=1.0, num_segments=1)
    order = sorted(task.held_out, key=lambda place: place.sample_id)
    reports: list[LossReport] = []
    tokens = 0
    for row in itertools.islice(pack(order, task.config.batch_tokens, epoch=0), task.config.eval_rows):
        batch = load_row(task.corpus, row, greedy).batch
        if batch is None:
            continue
        tokens += batch.input_ids.shape[0]
        on_device = moved(batch, task.device)
        with autocast(task):
            reports.append(task.algorithm.training_loss(model, on_device, teacher=teacher, settings=settings))
    return _evaluation(reports, step, tokens) if reports else None


def _evaluation(reports: Sequence[LossReport], step: int, tokens: int) -> Evaluation:
    def total(pick: Callable[[LossReport], torch.Tensor]) -> list[float]:
        return torch.stack([pick(report).double().cpu() for report in reports]).sum(0).tolist()

    columns = zip(
        total(lambda r: r.counts),
        total(lambda r: r.losses),
        total(lambda r: r.hits),
        total(lambda r: r.outside),
        total(lambda r: r.prefix_counts),
        total(lambda r: r.prefix_hits),
        strict=True,
    )
    depths = tuple(
        DepthScore(depth, loss / max(n, 1), hits / max(n, 1), joint / max(chains, 1), outside / max(n, 1))
        for depth, (n, loss, hits, outside, chains, joint) in enumerate(columns)
    )
    losses = sum(float(report.loss) for report in reports) / max(sum(float(r.weight) for r in reports), 1e-9)
    return Evaluation(step, tokens, losses, 1.0 + sum(depth.joint_rate for depth in depths), depths)


def _sizes(batch: DraftBatch) -> tuple[float, float, float]:
    """Tokens, supervised tokens and samples of a batch."""
    return float(batch.input_ids.shape[0]), float(batch.loss_mask.bool().sum()), float(len(batch.offsets) - 1)

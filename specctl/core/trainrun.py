"""A training run on one rank: the loop runs, and what it yields goes to disk. Only the lead writes.

The job is picklable, so that it runs on any rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specctl import plugins
from specctl.core import headmaking, trainstate
from specctl.core.device import memory_held, pick_device, release_mapped
from specctl.core.modules import DraftModel
from specctl.core.optimizer import make_optimizer
from specctl.core.packing import Row
from specctl.core.placement import Placement
from specctl.core.replicas import Replicas, whole
from specctl.core.rowloader import GreedyTokens, load_row, moved
from specctl.core.teaching import teacher_of
from specctl.core.training import StepReport, Trainer
from specctl.core.trainlog import RunLog
from specctl.core.trainscore import evaluate
from specctl.core.trainsetup import Ready, doubts, prepare
from specctl.errors import MachineError
from specctl.files.durable import new_folder
from specctl.files.head import Asked
from specctl.files.headfolder import write_head
from specctl.files.jsonfile import to_json
from specctl.records.progress import Reporter
from specctl.records.training import DRAFT, Evaluation, TrainConfig

RESULT_FILE = ".result.json"


@dataclass(frozen=True, slots=True)
class TrainJob:
    """A run of `specctl train` on the rank that it is called on."""

    config: TrainConfig

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        try:
            self._run(placement, reporter)
        except RuntimeError as error:
            # On a CPU torch says it with a plain RuntimeError.
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise MachineError(
                f"out of memory with rows of {self.config.batch_tokens} tokens",
                where=self.config.out,
                hint="a smaller `--batch-tokens`, `checkpoint_layers = true` in the config, or `--segments`",
            ) from error

    def _run(self, placement: Placement, reporter: Reporter) -> None:
        config, out = self.config, Path(self.config.out)
        ready = prepare(config, pick_device(config.device, placement.local_rank))
        if placement.is_lead:
            for doubt in doubts(ready, config):
                reporter.warn(doubt)
        replicas = Replicas(placement, is_sharded=config.fsdp)
        trainer = make_trainer(ready, config, replicas)
        start = trainstate.newest(out) if config.resume else None
        if start is not None:
            trainer.progress = trainstate.load_state(start, trainer.model, trainer.optimizer)
        if config.resume:
            is_new = start is None
            reporter.note("nothing was saved: from the start" if is_new else f"from step {trainer.progress.step} on")
        replicas.wait()
        run_loop(ready, trainer, config, reporter, is_lead=replicas.rank == 0)


def make_trainer(ready: Ready, config: TrainConfig, replicas: Replicas) -> Trainer:
    """The model with its first weights, the teacher and the optimizer."""
    task = ready.task
    model = first_model(ready, config).to(task.device)
    vocabulary = model.vocabulary()
    teacher = teacher_of(ready.parts, None if vocabulary is None else vocabulary.cpu(), task.compute_dtype, task.device)
    for table in (ready.parts.embedding, ready.parts.head):  # what was copied out of them is all that every step needs
        release_mapped(table)
    replicas.spread(model, task.device)
    # Sparse rows have another set of rows on each rank, which no sum over ranks takes.
    model.embeds_sparsely = replicas.size == 1 and model.embed_tokens.weight.requires_grad
    optimizer = make_optimizer(
        (p for p in model.parameters() if p.requires_grad),
        lr=task.lr,
        betas=config.betas,
        weight_decay=config.weight_decay,
    )
    return Trainer(task, model, teacher, optimizer, replicas)


def first_model(ready: Ready, config: TrainConfig) -> DraftModel:
    """A fresh model, or that of `init_from` with its own map and shape."""
    if config.init_from is None:
        return headmaking.fresh_model(ready.head, ready.parts, ready.vocabulary, config)
    from specctl.core.warmstart import warm_start

    return warm_start(config, ready.head, ready.parts)


def run_loop(ready: Ready, trainer: Trainer, config: TrainConfig, reporter: Reporter, *, is_lead: bool) -> None:
    """Train to the end; the lead logs, saves and scores."""
    out, task = Path(config.out), trainer.task
    greedy = GreedyTokens(trainer.teacher)
    last: StepReport | None = None
    scored: Evaluation | None = None
    reporter.start("train", task.total_steps, "steps", trainer.progress.step)
    if is_lead and trainer.progress.step < task.total_steps:
        (out / RESULT_FILE).unlink(missing_ok=True)  # of a shorter run, which this one goes on from
    with RunLog(out, config.log) if is_lead else nullcontext() as log:
        for last in trainer.steps():
            step = last.progress.step
            reporter.advance(1)
            is_last = step == task.total_steps
            if log is not None and (step % config.log_every == 0 or is_last or step == 1):
                log.write("train", step_record(last, task.device))
                reporter.note(step_line(last, task.total_steps, task.device))
            if step % config.eval_every == 0 or is_last:
                scored = evaluate(trainer, step, greedy=greedy)
                if log is not None and scored is not None:
                    log.write("eval", asdict(scored))
                    reporter.note(evaluation_line(scored))
            if step % config.save_every == 0 or is_last:
                save(out, trainer, ready, is_lead=is_lead)
    reporter.stop()
    # A run that was finished already keeps the result it had; without one it was killed while saving.
    if last is None and not (out / RESULT_FILE).exists():
        save(out, trainer, ready, is_lead=is_lead)
        scored = evaluate(trainer, trainer.progress.step, greedy=greedy)
    if is_lead and (last is not None or not (out / RESULT_FILE).exists()):
        write_result(out, trainer, scored)


def save(out: Path, trainer: Trainer, ready: Ready, *, is_lead: bool) -> None:
    """A checkpoint to continue from, and the draft that a server loads; every rank calls, the lead writes.

    Raises MachineError.
    """
    weights, moments = whole(trainer.model.state_dict()), whole(trainer.optimizer.state_dict())
    if not is_lead:
        return
    trainstate.save_state(out, weights, moments, trainer.progress)
    save_draft(out / DRAFT, trainer.model, weights, ready)
    trainstate.prune(out, ready.task.config.keep)


def save_draft(folder: Path, model: DraftModel, weights: Mapping[str, torch.Tensor], ready: Ready) -> None:
    """The canonical checkpoint of a model's whole `weights`; an older one in its place is replaced."""
    has_embedding = model.embed_tokens.weight.requires_grad
    served = headmaking.served_head(model.head, weights, has_embedding=has_embedding, inv_freq=model.rotary.inv_freq)
    asked = Asked(
        target=ready.parts.files.facts, embedding=ready.parts.files.embedding, lm_head=ready.parts.files.lm_head
    )
    written = plugins.load_format("vllm").write(served, asked)
    fresh = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    with new_folder(fresh, "a draft") as temporary:
        write_head(temporary, written.config, written.tensors)
    try:
        replace_folder(fresh, folder)
    except OSError as error:
        raise MachineError(f"the draft cannot be put in place: {error.strerror}", where=str(folder)) from error


def replace_folder(fresh: Path, folder: Path) -> None:
    """Put `fresh` in the place of `folder` by two renames, so that a kill hardly finds neither. Raises OSError."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.is_dir():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def step_record(report: StepReport, device: torch.device) -> dict[str, Any]:
    """What the log keeps of a step."""
    done = report.progress
    return {
        "step": done.step,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "tokens": done.tokens,
        "supervised_tokens": done.supervised,
        "bad_samples": done.bad_samples,
        "seconds": round(done.seconds, 3),
        "memory_bytes": memory_held(device),
    }


def step_line(report: StepReport, total: int, device: torch.device) -> str:
    """What a person sees of a step; the memory is the process's own."""
    done = report.progress
    rate = done.tokens / done.seconds if done.seconds else 0.0
    return (
        f"step {done.step}/{total}  loss {report.loss:.4f}  lr {report.lr:.2e}  {rate:,.0f} tokens/s  "
        f"{memory_held(device) / 2**30:.1f} GiB"
    )


def evaluation_line(scored: Evaluation) -> str:
    """What a person sees of a held-out score."""
    rates = " ".join(f"{depth.accuracy:.2f}" for depth in scored.depths)
    return (
        f"step {scored.step}  held out: loss {scored.loss:.4f}  simulated acceptance length "
        f"{scored.acceptance_length:.3f}  accuracy by depth {rates}"
    )


def write_result(out: Path, trainer: Trainer, scored: Evaluation | None) -> None:
    """What the recipe reports, from the rank that knows it."""
    model = trainer.model
    record = {
        "progress": asdict(trainer.progress),
        "loss": trainer.progress.loss,
        "evaluation": asdict(scored) if scored is not None else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flat_gap": served_gap(trainer),
        "samples": len(trainer.task.training),
        "held_out": len(trainer.task.held_out),
    }
    try:
        (out / RESULT_FILE).write_text(to_json(record), encoding="utf-8")
    except OSError as error:
        raise MachineError(f"the result cannot be written: {error.strerror}", where=str(out)) from error


def served_gap(trainer: Trainer) -> float | None:
    """How far a P-EAGLE draft's training forward is from what a server runs, in fp32 on one sample.

    None for drafts that train as they are served, and for a model that ranks share.
    """
    task = trainer.task
    if not task.algorithm.IS_PARALLEL or trainer.replicas.is_sharded:
        return None
    place = min((task.held_out or task.training), key=lambda place: place.sample_id)
    batch = load_row(task.corpus, Row(0, 0, (place,)), None).batch
    if batch is None or len(place) < 2:
        return None
    gap: float = task.algorithm.flat_gap(trainer.model, moved(batch, task.device), task.settings.num_draft_tokens)
    return gap

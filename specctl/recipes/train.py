"""The road from shards to a draft: settled settings, ranks started, the draft checked at the end. Knows no torch."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

from specctl.errors import InterruptedRun, MachineError, SpecctlError, UsageError
from specctl.recipes.trainfolder import begun, forget
from specctl.records.check import CheckConfig
from specctl.records.progress import Reporter, SilentReporter
from specctl.records.training import (
    DRAFT,
    DepthScore,
    Evaluation,
    TrainConfig,
    TrainReport,
)

SCHEDULES = ("cosine", "linear", "constant")

RANGES: Final[Mapping[str, tuple[Callable[[float], bool], tuple[str, ...]]]] = {
    "not 1 or more": (
        lambda value: value >= 1,
        (
            *("batch_tokens", "accumulate", "num_layers", "eval_every", "eval_rows", "save_every", "keep"),
            *("log_every", "nproc", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        ),
    ),
    "not above 0 and finite": (
        lambda value: 0 < value < math.inf,
        (
            *("max_steps", "epochs", "lr", "num_draft_tokens", "draft_vocab_size", "hidden_size", "head_dim"),
            *("clip", "depth_decay", "rope_theta"),
        ),
    ),
    "not 0 or more and finite": (lambda value: 0 <= value < math.inf, ("warmup", "weight_decay")),
    "not from 0 to below 1": (lambda value: 0 <= value < 1, ("eval_fraction",)),
    "not from 0 to 1": (lambda value: 0 <= value <= 1, ("min_lr", "max_bad_samples", "cod_ratio", "cod_floor")),
    "not a number of 64 bits": (lambda value: -(1 << 63) <= value < 1 << 63, ("seed",)),
}
"""What a number must not be, and the settings that must not be so. No comparison holds for NaN."""

FILE_ONLY: Final = (
    *("clip", "eval_rows", "head_dim", "hidden_size", "intermediate_size", "log_every", "max_bad_samples", "min_lr"),
    *("num_attention_heads", "num_key_value_heads", "rope_theta", "segments", "warmup", "weight_decay"),
)
"""Numbers that have no flag and are given in the config file."""

PARALLEL_ONLY: Final = ("ptd_token_id", "cod_ratio", "cod_floor", "segments")
"""Settings of P-EAGLE, which an EAGLE-3 draft has no use for."""


def train(config: TrainConfig, reporter: Reporter) -> TrainReport | None:
    """Train a draft, or go on with one; None on a torchrun rank that has nothing to report.

    Raises SpecctlError for whatever the user or the machine can cause; what is saved stays whole.
    """
    from specctl.core import parallel
    from specctl.core.launch import run_local
    from specctl.core.trainrun import TrainJob

    refuse(config)
    world = parallel.torchrun_world(1, 1)
    ranks = world.size if world is not None else config.nproc
    refuse_uneven(config, ranks)
    out = Path(config.out)
    is_lead = world is None or world.rank == 0
    began = time.monotonic()
    with begun(config, out, reporter) if is_lead else contextlib.nullcontext():
        try:
            if world is not None:
                parallel.run_in_world(
                    world, TrainJob(config), pp=world.size, tp=1, device=config.device, reporter=reporter
                )
            else:
                run_local(TrainJob(config), pp=ranks, tp=1, device=config.device, reporter=reporter)
        except KeyboardInterrupt:
            hint = "`--resume` goes on from the last save, which is made after each `--save-every` steps"
            raise InterruptedRun("interrupted", where=str(out), hint=hint) from None
        except SpecctlError:
            if is_lead:
                forget(out)
            raise
        return report_on(config, out, time.monotonic() - began) if is_lead else None


def refuse_uneven(config: TrainConfig, ranks: int) -> None:
    """Raises UsageError where the rows of a step cannot be shared out evenly over the processes."""
    if config.accumulate % ranks:
        raise UsageError(
            f"`--accumulate {config.accumulate}` is no multiple of the {ranks} processes",
            hint=f"make it a multiple of {ranks}: one process and several give the same run only with even shares",
        )


def refuse(config: TrainConfig) -> None:
    """Raises UsageError for values that have no meaning, before anything is read."""
    if not config.shards:
        raise UsageError("no shard folder is given", hint="name the folders that `specctl extract` wrote")
    _refuse_numbers(config)
    if config.max_steps is not None and config.epochs is not None:
        raise UsageError("`--max-steps` and `--epochs` both say how long to train", hint="give one of the two")
    if config.schedule not in SCHEDULES:
        raise UsageError(f"`schedule` is `{config.schedule}`", hint=f"it is one of {', '.join(SCHEDULES)}")
    if config.init_head not in ("target", "fresh"):
        raise UsageError(f"`init_head` is `{config.init_head}`", hint="it is `target` or `fresh`")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise UsageError(f"`betas` are {list(config.betas)}; they are two numbers from 0 to below 1, as in [0.9, 0.95]")
    if config.norm_before_fc and config.fc_norm:
        raise UsageError("`norm_before_fc` and `fc_norm` exclude each other", hint="norm each state or all together")
    if config.weights and len(config.weights) != len(config.shards):
        raise UsageError(f"{len(config.weights)} `weights` for {len(config.shards)} shard folders")
    if config.weights and not (all(0 <= weight < math.inf for weight in config.weights) and any(config.weights)):
        raise UsageError(f"`weights` are {list(config.weights)}; each is 0 or more and finite, and one above 0")
    defaults = {field.name: field.default for field in fields(TrainConfig)}
    for name in PARALLEL_ONLY:
        if not config.parallel_drafting and getattr(config, name) != defaults[name]:
            raise UsageError(f"`{_spelled(name)}` has a meaning only with `--parallel-drafting`")
    if config.dtype not in ("auto", "float32", "bfloat16"):
        raise UsageError(f"`--dtype {config.dtype}` is not auto, float32 or bfloat16")


def _refuse_numbers(config: TrainConfig) -> None:
    for what, (is_right, names) in RANGES.items():
        for name, value in ((name, getattr(config, name)) for name in names):
            if value is not None and not is_right(value):
                spelled = f"{name} =" if name in FILE_ONLY else _spelled(name)
                raise UsageError(f"`{spelled} {value}` is {what}")


def _spelled(name: str) -> str:
    return name if name in FILE_ONLY else f"--{name.replace('_', '-')}"


def report_on(config: TrainConfig, out: Path, seconds: float) -> TrainReport:
    """What the run did, with the verdict of `check-ckpt` on its draft."""
    from specctl.core.trainrun import RESULT_FILE
    from specctl.recipes.check import check

    try:
        result = json.loads((out / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MachineError("the run ended without a result", where=str(out)) from error
    checked = check(CheckConfig(str(out / DRAFT), target=_target_path(config.target)), SilentReporter())
    errors = [finding.rule for finding in checked.findings if finding.level == "error"]
    verdict = "passes" if checked.passes else f"fails: {', '.join(errors)}"
    done, scored = result["progress"], result["evaluation"]
    evaluation = None
    if scored is not None:
        depths = tuple(DepthScore(**depth) for depth in scored.pop("depths"))
        evaluation = Evaluation(**scored, depths=depths)
    return TrainReport(
        out=str(out),
        draft=str(out / DRAFT),
        steps=done["step"],
        tokens=done["tokens"],
        supervised_tokens=done["supervised"],
        samples=result["samples"],
        held_out=result["held_out"],
        bad_samples=done["bad_samples"],
        parameters=result["parameters"],
        trained_parameters=result["trained"],
        seconds=seconds,
        loss=math.nan if result["loss"] is None else result["loss"],
        evaluation=evaluation,
        verdict=verdict,
        passes=checked.passes,
        flat_gap=result.get("flat_gap"),
    )


def _target_path(target: str) -> str | None:
    """What `check-ckpt` can read of the target; a GGUF file has no headers that it knows."""
    return None if target.endswith(".gguf") else target

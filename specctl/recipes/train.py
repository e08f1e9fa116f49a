"""The road from shards to a draft: settled settings, ranks started, the draft checked at the end. Knows no torch."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from specctl.errors import InputError, InterruptedRun, MachineError, SettingsChangedError, SpecctlError, UsageError
from specctl.records.check import CheckConfig
from specctl.records.progress import Reporter, SilentReporter
from specctl.records.provenance import versions
from specctl.records.training import (
    CHECKPOINTS,
    DRAFT,
    FIXED,
    LOG_FILE,
    RUN_FILE,
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

PATHS: Final = ("target", "init_from")
"""Settings that may be a path, which is another text from another working folder."""

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
                _forget(out)
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


@contextlib.contextmanager
def begun(config: TrainConfig, out: Path, reporter: Reporter) -> Iterator[None]:
    """Make the run's folder, or see that this run fits the one there, and keep it to this run.

    Raises SettingsChangedError listing what differs, UsageError for a folder that is in the way, MachineError
    while another run trains in it.
    """
    from specctl.core.folder import write_atomic

    settings, run = settings_of(config), out / RUN_FILE
    record = {"settings": settings, "config": asdict(config), "versions": dict(versions())}
    try:
        if run.exists():
            _continue(config, settings, run, reporter)
        elif out.exists() and any(out.iterdir()):
            raise UsageError(f"`--out {out}` holds other files", hint="choose another folder for this run")
        elif config.resume:
            raise UsageError("there is nothing to resume", where=str(out), hint="leave `--resume` out to start")
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        _lock(folder, out)
        try:
            write_atomic(run, (json.dumps(record, indent=1) + "\n").encode())
        except OSError as error:
            raise _unwritable(out, error) from error
        yield
    finally:
        os.close(folder)


def _lock(folder: int, out: Path) -> None:
    """Raises MachineError while another process holds the folder; ends with this one, however it ends."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MachineError(
            "another run trains in this folder", where=str(out), hint="wait for it, or choose another `--out`"
        ) from None
    except OSError:
        return  # a file system without locks


def _unwritable(out: Path, error: OSError) -> MachineError:
    return MachineError(f"the run's folder cannot be written: {error.strerror}", where=str(out))


def settings_of(config: TrainConfig) -> Mapping[str, Any]:
    """The settings that a resumed run has to share, as JSON holds them. Raises ShardError."""
    values = {key: getattr(config, key) for key in FIXED}
    values["shards"] = [str(Path(folder).resolve()) for folder in config.shards]
    values |= {key: _settled(values[key]) for key in PATHS}
    values["shard_contents"] = [_contents(Path(folder)) for folder in config.shards]
    plain: Mapping[str, Any] = json.loads(json.dumps(values))
    return plain


def _settled(name: str | None) -> str | None:
    """A path as it is from anywhere; the id of a hub model stays."""
    return str(Path(name).resolve()) if name is not None and _is_there(name) else name


def _is_there(name: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # no name of a file at all
        return Path(name).exists()
    return False


def _contents(folder: Path) -> str:
    """What tells the shards of a folder from others that took their place."""
    from specctl.core.folder import read_manifest

    files = [(entry.file, entry.checksum) for entry in read_manifest(folder).shards]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def _forget(out: Path) -> None:
    """Remove the record of a run that failed before its first step, so that the corrected command can run."""
    if not (out / LOG_FILE).exists() and not (out / CHECKPOINTS).exists():
        with contextlib.suppress(OSError):
            (out / RUN_FILE).unlink()


def _continue(config: TrainConfig, new: Mapping[str, Any], run: Path, reporter: Reporter) -> None:
    try:
        old = {**json.loads(run.read_text(encoding="utf-8"))["settings"]}
        old |= {key: _settled(old[key]) for key in PATHS if key in old}
    except (ValueError, KeyError, TypeError) as error:
        raise InputError("the run's settings cannot be read", where=str(run)) from error
    if not config.resume:
        raise UsageError(
            f"`--out {config.out}` holds a run already", hint="`--resume` goes on with it; or choose another folder"
        )
    differing = [f"{key}: {old[key]} -> {new[key]}" for key in new if key in old and old[key] != new[key]]
    if differing:
        raise SettingsChangedError(
            "the run was started with other settings: " + "; ".join(differing),
            where=str(run),
            hint="resume with the same settings, or start another run with `--init-from` this one's draft",
        )
    unsaid = [f"`{key}`" for key in new if key not in old]
    if unsaid:
        reporter.note(f"the run was started by a specctl that did not record {', '.join(unsaid)}; taken as given now")


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

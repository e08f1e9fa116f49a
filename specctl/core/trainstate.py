"""The state of a training run on disk: everything that a killed run needs to go on to the same bits.

A checkpoint is a folder that appears whole or not at all; the newest whole one is what a run resumes from.
"""

from __future__ import annotations

import math
import pickle
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from specctl.core.replicas import like
from specctl.errors import InputError, SettingsChangedError
from specctl.files.durable import new_folder, sync_file
from specctl.records.training import CHECKPOINTS

STATE = "state.pt"
_DAMAGED = (
    *(OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError, EOFError),
    pickle.UnpicklingError,
)
_STEP = re.compile(r"step-(\d{9})")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: optimizer steps, rows taken, tokens and samples seen, and the last mean loss.

    `skipped` counts the latest steps in a row that were not taken, for want of a finite gradient.
    """

    step: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    samples: int = 0
    bad_samples: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    skipped: int = 0


def save_state(out: Path, model: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any], progress: Progress) -> Path:
    """Write a checkpoint of fp32 masters, optimizer, position and random states.

    One of this step that is there is kept: it is what the run went on from, and to write it again would leave
    a moment without it. Raises MachineError.
    """
    folder = out / CHECKPOINTS / f"step-{progress.step:09d}"
    if (folder / STATE).is_file():
        return folder
    record = {
        "model": dict(model),
        "optimizer": optimizer,
        "progress": asdict(progress),
        "torch_rng": torch.get_rng_state(),
        "python_rng": _plain(random.getstate()),
    }
    with new_folder(folder, "a checkpoint") as temporary:
        _write(record, temporary / STATE)
    return folder


def _write(record: Mapping[str, Any], path: Path) -> None:
    """Raises OSError, also for a full disk, which torch tells as an error of its archive."""
    try:
        with path.open("wb") as file:
            torch.save(record, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    sync_file(path)


def load_state(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Put a checkpoint's weights, moments and random states in force; a rank of a shared model takes its share.

    Raises InputError, SettingsChangedError for the map of another draft vocabulary: the teacher's is made already.
    """
    path = folder / STATE
    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
        held = model.state_dict()
        _require_same_map(record["model"].get("d2t"), held.get("d2t"), path)
        model.load_state_dict({name: like(value, held[name]) for name, value in record["model"].items()})
        optimizer.load_state_dict(_shared_moments(record["optimizer"], optimizer))
        torch.set_rng_state(record["torch_rng"])
        version, words, gauss = record["python_rng"]
        random.setstate((version, tuple(words), gauss))
        return _progress(record["progress"])
    except _DAMAGED as error:
        raise InputError(
            f"the checkpoint cannot be continued from: {(str(error) or repr(error)).splitlines()[0]}",
            where=str(path),
            hint="remove this checkpoint's folder to continue from the one before",
        ) from error


def _require_same_map(old: torch.Tensor | None, new: torch.Tensor | None, path: Path) -> None:
    if old is not None and new is not None and old.shape == new.shape and not torch.equal(old, new.cpu()):
        raise SettingsChangedError(
            "the draft's vocabulary is not the one that the run began with",
            where=str(path),
            hint="were the shards' token counts, the target's end tokens or the draft to start from changed?",
        )


def _progress(record: dict[str, Any]) -> Progress:
    """The progress of a record. Raises TypeError for numbers that are none."""
    for field in fields(Progress):
        wanted = (int, float) if field.type == "float" else int
        value = record.get(field.name, field.default)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(f"`{field.name}` of its progress is {value!r}")
    return Progress(**record)


def _shared_moments(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with each moment held as its parameter is; counters stay as they are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        index: {name: like(v, parameters[index]) if v.dim() else v for name, v in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": moments}


def newest(out: Path) -> Path | None:
    """The checkpoint to resume from, None where there is none."""
    found = checkpoints(out)
    return found[-1] if found else None


def checkpoints(out: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    folder = out / CHECKPOINTS
    return sorted(path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)) if folder.is_dir() else []


def prune(out: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for folder in checkpoints(out)[: -keep or None]:
        shutil.rmtree(folder, ignore_errors=True)


def _plain(state: Any) -> list[Any]:
    version, words, gauss = state
    return [version, list(words), gauss]

"""The folder of a training run: what it was started with, whether another run fits it, and one run in it at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from specctl.errors import InputError, MachineError, SettingsChangedError, UsageError
from specctl.files import durable
from specctl.records.progress import Reporter
from specctl.records.provenance import versions
from specctl.records.training import CHECKPOINTS, FIXED, LOG_FILE, RUN_FILE, TrainConfig

PATHS: Final = ("target", "init_from")
"""Settings that may be a path, which is another text from another working folder."""


@contextlib.contextmanager
def begun(config: TrainConfig, out: Path, reporter: Reporter) -> Iterator[None]:
    """Make the run's folder, or see that this run fits the one there, and keep it to this run.

    Raises SettingsChangedError listing what differs, UsageError for a folder that is in the way, MachineError
    while another run trains in it.
    """
    from specctl.core.folder import write_atomic

    settings, run = settings_of(config), out / RUN_FILE
    record = {"settings": settings, "config": asdict(config), "versions": dict(versions())}
    refuse_folder(config, settings, reporter)
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise _unwritable(out, error) from error
    try:
        _lock(folder, out, reporter)
        try:
            write_atomic(run, (json.dumps(record, indent=1) + "\n").encode())
        except OSError as error:
            raise _unwritable(out, error) from error
        yield
    finally:
        os.close(folder)


def refuse_folder(config: TrainConfig, settings: Mapping[str, Any], reporter: Reporter) -> None:
    """Raises SettingsChangedError listing what differs from the run in `out`, UsageError for what is in the way there,
    MachineError where it cannot be read. Writes nothing.
    """
    out = Path(config.out)
    try:
        if (out / RUN_FILE).exists():
            _continue(config, settings, out / RUN_FILE, reporter)
        elif out.exists() and any(out.iterdir()):
            raise UsageError(f"`--out {out}` holds other files", hint="choose another folder for this run")
        elif config.resume:
            raise UsageError("there is nothing to resume", where=str(out), hint="leave `--resume` out to start")
    except OSError as error:
        raise _unwritable(out, error) from error


def _lock(folder: int, out: Path, reporter: Reporter) -> None:
    """Raises MachineError while another process holds the folder; ends with this one, however it ends."""
    try:
        is_locked = durable.lock(folder)
    except BlockingIOError:
        raise MachineError(
            "another run trains in this folder", where=str(out), hint="wait for it, or choose another `--out`"
        ) from None
    if not is_locked:
        reporter.note("the file system has no locks: nothing keeps a second run out of this folder")


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


def forget(out: Path) -> None:
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

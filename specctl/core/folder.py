"""The shard folder: its manifest, its lock, what is left of a killed run. Knows files, not tensors.

Order of events that makes a kill harmless: a shard is written under a hidden name, synced, renamed;
then the manifest, likewise. Whatever the manifest lists is whole.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from specctl.errors import MachineError, SettingsChangedError, ShardError, SpecctlError
from specctl.files import durable
from specctl.files.durable import sync_folder as sync_folder
from specctl.records.progress import Reporter, SilentReporter
from specctl.records.shard import (
    MANIFEST,
    SHARDS,
    DroppedSample,
    Manifest,
    ShardEntry,
    differing_settings,
    manifest_from_json,
)

TOKEN_COUNTS: Final = "token_counts.safetensors"
LOCK: Final = ".lock"
MANIFEST_LOCK: Final = ".manifest.lock"
PREPARED: Final = ".prepared"
NO_LOCKS: Final = "the file system has no locks: nothing keeps a second run out of this folder"
_BEFORE_MANIFEST: Final = (SHARDS, LOCK, f".{MANIFEST}.tmp")
"""What a run that was killed before it wrote a manifest may have left; `shards` is empty then."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a shard folder. Raises ShardError."""
    path = folder / MANIFEST
    try:
        return manifest_from_json(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, NotADirectoryError):
        what = "holds no `manifest.json`" if folder.is_dir() else "is no folder"
        raise ShardError(
            f"`{folder}` {what}, so it is no shard folder", hint="name the folder given to `specctl extract --out`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(f"`{MANIFEST}` cannot be read: {error}", where=str(folder)) from error


def unsaid(folder: Path, names: Sequence[str]) -> list[str]:
    """Those of the settings `names` that the manifest in `folder` does not state; none where there is no manifest."""
    try:
        stated = read_manifest(folder).settings
    except ShardError:
        return []  # none is there yet, or whoever takes the folder says what is wrong with it
    return [name for name in names if name not in stated]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step. Raises OSError."""
    write_atomic(folder / MANIFEST, manifest.to_json().encode())


def write_atomic(path: Path, data: bytes) -> None:
    """Write a hidden file beside `path`, sync it, and rename it. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def held(folder: Path, *, overwrite: bool, reporter: Reporter | None = None) -> Iterator[None]:
    """Make `folder` (or empty it, with `overwrite`) and keep it to this run, where its file system has locks.

    Raises MachineError when another run has it or it cannot be written, ShardError when it holds
    files of something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_stranger(folder)
        lock = (folder / LOCK).open("a")
    except OSError as error:
        raise cannot_write(folder, error) from error
    with lock:
        try:
            is_locked = durable.lock(lock.fileno())
        except BlockingIOError:
            raise MachineError(
                "another run is writing this folder", where=str(folder), hint="wait for it, or choose another `--out`"
            ) from None
        if not is_locked:
            (reporter or SilentReporter()).note(NO_LOCKS)
        try:
            _clean(folder, overwrite=overwrite)
        except OSError as error:
            raise cannot_write(folder, error) from error
        yield


def _refuse_stranger(folder: Path) -> None:
    """Raises ShardError when `folder` holds something and no manifest of ours. Touches nothing."""
    if (folder / MANIFEST).exists():
        _refuse_strange_manifest(folder)
        return
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in _BEFORE_MANIFEST)
    if (folder / SHARDS).exists():
        foreign += sorted(f"{SHARDS}/{p.name}" for p in (folder / SHARDS).iterdir())
    if foreign:
        raise ShardError(
            f"the folder holds `{foreign[0]}` and no manifest of specctl",
            where=str(folder),
            hint="choose an empty or new folder for `--out`",
        )


def _refuse_strange_manifest(folder: Path) -> None:
    """Many tools write a `manifest.json`; what lies beside theirs is not ours to delete."""
    try:
        data = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        is_ours = {"format_version", "settings", "shards"} <= set(data)
    except (ValueError, TypeError):
        is_ours = False
    if not is_ours:
        raise ShardError(
            f"`{MANIFEST}` is not one of specctl", where=str(folder), hint="choose an empty or new folder for `--out`"
        )


def _clean(folder: Path, *, overwrite: bool) -> None:
    """Remove what a killed run left; with `overwrite` all that is ours. Never a stranger's file."""
    shards = folder / SHARDS
    if overwrite:
        # The manifest goes last: without it, what a kill leaves here would be a stranger's.
        if shards.exists():
            shutil.rmtree(shards)
        (folder / TOKEN_COUNTS).unlink(missing_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)
    shards.mkdir(exist_ok=True)
    remove_temporaries(folder)


def remove_temporaries(folder: Path) -> None:
    """Remove the token spool and half-written files."""
    shutil.rmtree(folder / PREPARED, ignore_errors=True)
    for path in [*folder.glob(".*.tmp"), *(folder / SHARDS).glob(".*")]:
        path.unlink(missing_ok=True)


def begin(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest to continue from: the one in `folder` when its settings are those of `manifest`.

    Raises SettingsChangedError listing every differing setting, ShardError when a listed shard has
    another size, MachineError when the folder cannot be written. A listed shard that is missing is
    no longer listed; a shard that the manifest does not list is removed. A manifest that lists no
    shard, as a run that could not read DATA leaves it, holds nobody to its settings.
    """
    try:
        return _begin(folder, manifest)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _begin(folder: Path, manifest: Manifest) -> Manifest:
    old = read_manifest(folder) if (folder / MANIFEST).exists() else None
    if old is None or not old.shards:
        _remove_unlisted(folder, ())
        write_manifest(folder, manifest)
        return manifest
    differing = differing_settings(old.settings, manifest.settings)
    if differing:
        raise SettingsChangedError(
            f"the folder was made with other settings: {'; '.join(differing)}",
            where=str(folder),
            hint="give the old settings (`slots` is `--layers`) to continue it, `--overwrite` to start over, "
            "or another `--out`",
        )
    kept = tuple(e for e in old.shards if e.rows == 0 or (folder / SHARDS / e.file).exists())
    for entry in (e for e in kept if e.rows):
        size = (folder / SHARDS / entry.file).stat().st_size
        if size != entry.bytes:
            raise ShardError(
                f"the shard has {size} bytes; {entry.bytes} were written",
                where=str(folder / SHARDS / entry.file),
                hint="delete this file and run the same command again; it makes only what is missing",
            )
    _remove_unlisted(folder, kept)
    if len(kept) == len(old.shards):
        return old
    files = {entry.file for entry in kept}
    drops = tuple(drop for drop in old.dropped_samples if drop.shard in files)
    left = replace(old, shards=kept, dropped_samples=drops, is_complete=False)
    write_manifest(folder, left)
    return left


def _remove_unlisted(folder: Path, listed: Sequence[ShardEntry]) -> None:
    names = {entry.file for entry in listed}
    for path in (folder / SHARDS).iterdir():
        if path.name not in names and path.stem.isdigit():
            path.unlink()


def add_shard(folder: Path, entry: ShardEntry, dropped: Iterable[DroppedSample], *, is_shared: bool) -> None:
    """List a shard that is in place. `is_shared` guards against replicas on the same manifest."""
    with _manifest_lock(folder, is_shared=is_shared):
        old = read_manifest(folder)
        others = [e for e in old.shards if e.file != entry.file]
        drops = [d for d in old.dropped_samples if d.shard != entry.file] + list(dropped)
        write_manifest(
            folder,
            replace(
                old,
                shards=tuple(sorted([*others, entry], key=lambda e: e.file)),
                dropped_samples=tuple(sorted(drops, key=lambda d: (d.shard, d.sample_id))),
                is_complete=False,
            ),
        )


@contextmanager
def _manifest_lock(folder: Path, *, is_shared: bool) -> Iterator[None]:
    if not is_shared:
        yield
        return
    with (folder / MANIFEST_LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise MachineError(
                f"replicas share this folder by locks, and its file system has none: {error.strerror}",
                where=str(folder),
                hint="run as many processes as pp x tp, or write to another file system",
            ) from error
        yield


def cannot_write(folder: Path, error: OSError, needed: int | None = None) -> SpecctlError:
    """What to tell the user about an OSError on `folder`; a full disk with needed and free bytes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f"{shutil.disk_usage(folder).free:,} bytes are free"
        except OSError:
            free = "none is free"
        wanted = f"{needed:,} bytes were needed and " if needed else ""
        return MachineError(
            f"the disk is full: {wanted}{free}",
            where=str(folder),
            hint="finished shards are kept; make room and run the same command again to continue",
        )
    return MachineError(f"cannot write to the folder: {error.strerror or error}", where=str(folder))

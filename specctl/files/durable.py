"""Writes that survive a power cut and leave nothing half done. Knows paths, not what is written."""

import errno
import fcntl
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from specctl.errors import MachineError, SpecctlError, UsageError
from specctl.files.regular import open_regular, shown, size_of, unreadable

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_TAKEN: Final = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_HELD: Final = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_FOLDER_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)
"""How file systems such as FUSE and CIFS say that they sync files only."""


def lock(descriptor: int) -> bool:
    """Keep an open file or folder to this process until it closes it. False where the file system has no locks.

    Raises BlockingIOError while another process holds it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError(error.errno, error.strerror) from None
        return False  # Lustre and some NFS: ENOSYS, ENOLCK, EOPNOTSUPP
    return True


def sync_file(path: Path) -> None:
    """Force a file's bytes to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Force the names in a folder, and so a rename in it, to disk, where its file system can. Raises OSError."""
    try:
        sync_file(path)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def copy_plain(source: Path, to: Path, *, limit: int) -> bool:
    """Copy a foreign file of at most `limit` bytes and sync the copy; False, and no copy, when it is larger.

    Raises InputError when it is no plain file or cannot be read, OSError when the copy cannot be written.
    """
    with open_regular(source) as file:
        try:
            # One byte more, because the file may have grown since its size was asked.
            data = file.read(limit + 1) if size_of(file) <= limit else None
        except OSError as error:
            raise unreadable(source, error) from None
    if data is None or len(data) > limit:
        return False
    to.write_bytes(data)
    sync_file(to)
    return True


@contextmanager
def new_folder(out: Path, what: str) -> Iterator[Path]:
    """A hidden folder beside `out`, which becomes `out` at the end, or vanishes when anything fails.

    `what` names it in errors, as in "a checkpoint". Raises UsageError when `out` is taken, MachineError when
    it cannot be written or the disk is full.
    """
    place = Path(os.path.realpath(out))
    refuse_taken(out, what)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead(place)
        # Part of the name, so that a user sees what a killed run left; all of it may be too long for a file.
        temporary = place.with_name(f".{place.name[:40]}.{os.getpid()}-{uuid.uuid4().hex[:12]}.tmp")
        temporary.mkdir()
    except OSError as error:
        raise _cannot_write(out, error) from error
    try:
        yield temporary
        _sync_tree(temporary)
        _move(temporary, place, out, what)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _cannot_write(out, error) from error
    except BaseException:
        # KeyboardInterrupt too: a half-written folder must not look like something to use.
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _clear_dead(place: Path) -> None:
    """Remove what killed runs left beside `place`; folders of processes that live stay."""
    for left in place.parent.glob(f".{glob.escape(place.name[:40])}.*-*.tmp"):
        process = left.name.removesuffix(".tmp").rsplit(".", 1)[1].split("-")[0]
        if process.isdecimal() and not Path("/proc", process).exists() and Path("/proc").is_dir():
            shutil.rmtree(left, ignore_errors=True)


def refuse_taken(out: Path, what: str) -> None:
    """Raises UsageError when `out` is there and no empty folder."""
    place = Path(os.path.realpath(out))
    try:
        is_taken = os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir()))
    except OSError as error:
        raise _cannot_write(out, error) from error
    if is_taken:
        raise _taken(out, what)


def _move(temporary: Path, place: Path, out: Path, what: str) -> None:
    try:
        temporary.rename(place)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _taken(out, what) from None
        raise
    sync_folder(place.parent)


def _taken(out: Path, what: str) -> UsageError:
    return UsageError(
        f"expected a new or empty folder for {what} and found something there",
        where=shown(str(out)),
        hint="choose another folder, or remove what is there",
    )


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_file(Path(parent, name))
        sync_folder(Path(parent))


def _cannot_write(out: Path, error: OSError) -> SpecctlError:
    if error.errno in _FULL:
        return MachineError("the disk is full", where=shown(str(out)), hint="make room and run the same command again")
    reason = error.strerror or str(error)
    return MachineError(f"cannot write to the folder: {shown(reason)}", where=shown(str(out)))

"""Opens foreign files with care: plain files only, and no trust in their names. Knows no format.

A FIFO would wait for a writer for ever, and opening a device can have effects; both may lie in a folder
that was downloaded.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from specctl.errors import InputError

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BinaryIO:
    """The plain file at `path`, open for reading. Raises InputError when it is none or cannot be opened."""
    try:
        _require_regular(path, path.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError("the file is missing", where=shown(str(path))) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    file = os.fdopen(descriptor, "rb")
    try:
        # The path may name something else by now; what is open cannot change any more.
        _require_regular(path, os.fstat(descriptor))
    except InputError:
        file.close()
        raise
    return file


def size_of(file: BinaryIO) -> int:
    """The size in bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def kind_of(mode: int) -> str:
    """What a file is that is no plain file, from its `st_mode`."""
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no plain file")


def unreadable(path: Path, error: OSError | ValueError) -> InputError:
    """What to raise when the system refuses to read `path`."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return InputError(f"the file cannot be read: {shown(reason)}", where=shown(str(path)))


def shown(text: str, limit: int = 200) -> str:
    """`text` as it may be printed: without control characters or half surrogate pairs, and not endless."""
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"expected a plain file and found {kind_of(status.st_mode)}", where=shown(str(path)))

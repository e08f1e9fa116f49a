"""Whether a file of a foreign folder may be opened: plain, and in the folder. Opens nothing."""

import os
import stat
from pathlib import Path

from specctl.files.regular import kind_of, shown


class ClosedFile(Exception):
    """A file that is there and is not to be opened; the message says what it is instead of a plain file."""

    def __init__(self, found: str, *, is_outside: bool = False) -> None:
        super().__init__(found)
        self.found = found
        self.is_outside = is_outside


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in `folder`. Raises ClosedFile when it leads out of the folder or is no plain file."""
    path = folder / name
    try:
        root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
        mode = path.stat().st_mode if _is_ours(root, target) else None
    except (OSError, ValueError) as error:
        raise ClosedFile(shown(getattr(error, "strerror", None) or str(error))) from None
    if mode is None:
        raise ClosedFile(f"a link to {shown(str(target))}", is_outside=True)
    if not stat.S_ISREG(mode):
        raise ClosedFile(kind_of(mode))
    return path


def is_inside(folder: Path, name: str) -> bool:
    """Whether `inside` would give a path."""
    try:
        inside(folder, name)
    except ClosedFile:
        return False
    return True


def _is_ours(root: Path, target: Path) -> bool:
    """In the folder, or a blob of the Hugging Face cache: its `<repo>/snapshots/<revision>/` holds links to
    `<repo>/blobs/<hash>`.
    """
    is_blob = root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"
    return target.is_relative_to(root) or is_blob

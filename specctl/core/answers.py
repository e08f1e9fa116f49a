"""The file of answered conversations: locked, continued after a stop, finished in the prompts' order.

    FILE.jsonl            finished: appears, or changes, all at once
    FILE.jsonl.partial    rows as they come, while a run lasts or after it was stopped
    FILE.jsonl.truncated  rows that `--drop-truncated` left out, so that nobody computes them twice

Every row carries the settings that made it, so no file says more than its own rows do. Knows rows as
JSON lines; knows no target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from specctl.errors import DataError, MachineError, SettingsChangedError
from specctl.files import durable
from specctl.records.dialogue import Answered
from specctl.records.shard import differing_settings

PARTIAL: Final = ".partial"
LEFT_OUT: Final = ".truncated"
ROW_BEGIN: Final = b'{"id": '


@dataclass(frozen=True, slots=True)
class StoredRow:
    """Where a row lies, and what the report counts of it."""

    path: Path
    start: int
    size: int
    row_id: str
    num_turns: int
    num_unanswered: int
    num_empty: int
    is_truncated: bool


class AnswerFile:
    """The rows there are, by the key of their dialogue; a class for the open, locked file behind it."""

    def __init__(self, out: Path, settings: Mapping[str, Any], partial: IO[bytes]) -> None:
        self.out, self.settings, self.partial = out, settings, partial
        self.rows: dict[str, StoredRow] = {}

    def append(self, answered: Sequence[Answered]) -> None:
        """Add rows that are not there yet, and sync. Raises MachineError."""
        lines = [(row, _line(row, self.settings)) for row in answered if row.dialogue.key not in self.rows]
        start = self.partial.seek(0, os.SEEK_END)
        with _writing(_beside(self.out, PARTIAL)):
            self.partial.write(b"".join(line for _, line in lines))
            self.partial.flush()
            os.fsync(self.partial.fileno())
        for row, line in lines:
            stored = _stored(json.loads(line), _beside(self.out, PARTIAL), start, len(line))
            self.rows[row.dialogue.key] = stored
            start += len(line)

    def finish(self, planned: Mapping[str, str], *, drop_truncated: bool) -> tuple[list[StoredRow], int]:
        """The rows that the finished file holds, and how many of them are not among `planned`.

        `planned` maps keys to row ids in the order of the prompts. Rows of other prompts stay, after
        the others; an older row of a prompt that has changed gives way. Writes nothing where nothing
        changes or nothing would be kept. Raises MachineError.
        """
        ids = set(planned.values())
        ordered = [self.rows[key] for key in planned if key in self.rows]
        others = [row for key, row in self.rows.items() if key not in planned and row.row_id not in ids]
        kept = [row for row in ordered + others if not (drop_truncated and row.is_truncated)]
        left_out = [row for row in ordered + others if drop_truncated and row.is_truncated]
        if kept and not (self._is_already(kept, self.out) and self._is_already(left_out, LEFT_OUT)):
            self._replace(kept, left_out)
        if kept:
            self.partial.truncate(0)
        return kept, sum(not row.is_truncated or not drop_truncated for row in others)

    def _is_already(self, rows: Sequence[StoredRow], name: Path | str) -> bool:
        path = name if isinstance(name, Path) else _beside(self.out, name)
        there = [row for row in self.rows.values() if row.path == path]
        return list(rows) == sorted(there, key=lambda row: row.start)

    def _replace(self, kept: Sequence[StoredRow], left_out: Sequence[StoredRow]) -> None:
        with ExitStack() as stack:
            # Opened before anything is replaced: the rows are read from the files as they were.
            paths = {row.path for row in (*kept, *left_out)}
            sources = {path: stack.enter_context(path.open("rb")) for path in paths}
            # In this order a row that was computed is in some file at any moment.
            if left_out:
                _write_rows(_beside(self.out, LEFT_OUT), left_out, sources)
            _write_rows(self.out, kept, sources)
            if not left_out:
                _beside(self.out, LEFT_OUT).unlink(missing_ok=True)


@contextmanager
def open_answers(out: Path, settings: Mapping[str, Any], *, overwrite: bool) -> Iterator[AnswerFile]:
    """The answers at `out`, held by this process alone.

    Raises MachineError when another run holds it or it cannot be written, SettingsChangedError when
    rows there were made with other settings, DataError when the file is not one of ours.
    """
    out = Path(os.path.realpath(out))
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    partial = _lock(_beside(out, PARTIAL))
    try:
        file = AnswerFile(out, settings, partial)
        if overwrite:
            _discard(file)
        else:
            _read(file)
        yield file
    finally:
        # Removed under the lock; whoever waited for it sees that the name is gone.
        if os.fstat(partial.fileno()).st_size == 0:
            _beside(out, PARTIAL).unlink(missing_ok=True)
        partial.close()


def _discard(file: AnswerFile) -> None:
    with _writing(file.out):
        file.out.unlink(missing_ok=True)
        _beside(file.out, LEFT_OUT).unlink(missing_ok=True)
        file.partial.truncate(0)


def _read(file: AnswerFile) -> None:
    left_out, partial = _beside(file.out, LEFT_OUT), _beside(file.out, PARTIAL)
    if left_out.exists() and not (file.out.exists() or partial.stat().st_size):
        # What was finished is gone, and its leftovers with it.
        left_out.unlink()
    for path in (file.out, left_out, partial):
        if path.exists():
            rows, good = _index(path, file.settings)
            file.rows |= {key: row for key, row in rows.items() if key not in file.rows}
            if path == partial:
                file.partial.truncate(good)


def _index(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, StoredRow], int]:
    """The rows of `path` by key, and the bytes up to a last line that a crash has torn."""
    rows: dict[str, StoredRow] = {}
    good = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                if (rows or line.startswith(ROW_BEGIN)) and not line.endswith(b"\n"):
                    break
                raise _foreign(path, number) from None
            _check_row(row, settings, path=path, number=number)
            if not line.endswith(b"\n"):
                break
            rows[row["prompt_hash"]] = _stored(row, path, good, len(line))
            good += len(line)
    return rows, good


def _check_row(row: Any, settings: Mapping[str, Any], *, path: Path, number: int) -> None:
    needed = ("id", "messages", "finish_reasons", "truncated", "prompt_hash", "settings")
    if not isinstance(row, dict) or not all(key in row for key in needed):
        raise _foreign(path, number)
    if row["settings"] != settings:
        differences = "; ".join(differing_settings(row["settings"], settings))
        raise SettingsChangedError(
            f"rows there were made with other settings: {differences}",
            where=f"{path}:{number}",
            hint="use the old settings, write to another file, or start again with `--overwrite`",
        )


def _foreign(path: Path, number: int) -> DataError:
    return DataError(
        "the file is there and was not written by `specctl regenerate`",
        where=f"{path}:{number}",
        hint="write to another file, or replace it with `--overwrite`",
    )


def _line(row: Answered, settings: Mapping[str, Any]) -> bytes:
    asked = row.dialogue
    unanswered = asked.num_questions - len(row.answers)
    body = {
        "id": asked.row_id,
        "messages": row.messages(),
        **({"tools": list(asked.tools)} if asked.tools else {}),
        "finish_reasons": [answer.finish_reason for answer in row.answers],
        "truncated": row.is_truncated,
        **({"unanswered_turns": unanswered} if unanswered else {}),
        **({"category": asked.category} if asked.category is not None else {}),
        "source": Path(asked.where).name,
        "target": settings["target"],
        "prompt_hash": asked.key,
        "settings": settings,
    }
    return json.dumps(body, ensure_ascii=False).encode() + b"\n"


def _stored(row: Mapping[str, Any], path: Path, start: int, size: int) -> StoredRow:
    answers = [m for m in row["messages"] if m["role"] == "assistant"]
    return StoredRow(
        path=path,
        start=start,
        size=size,
        row_id=row["id"],
        num_turns=len(answers),
        num_unanswered=row.get("unanswered_turns", 0),
        num_empty=sum(not m["content"] and not m.get("tool_calls") for m in answers),
        is_truncated=row["truncated"],
    )


def _write_rows(path: Path, rows: Sequence[StoredRow], sources: Mapping[Path, IO[bytes]]) -> None:
    fresh = _beside(path, ".tmp")
    with _writing(path):
        with fresh.open("wb") as file:
            for row in rows:
                sources[row.path].seek(row.start)
                file.write(sources[row.path].read(row.size))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        durable.sync_folder(path.parent)


def _lock(path: Path) -> IO[bytes]:
    while True:
        with _writing(path):
            file = path.open("a+b")
        try:
            durable.lock(file.fileno())
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                return file
        except OSError as error:
            file.close()
            raise _not_locked(path, error) from error
        file.close()  # the run that held it has just finished and removed it


def _not_locked(path: Path, error: OSError) -> MachineError:
    if isinstance(error, BlockingIOError):
        return MachineError("another run writes to this file", where=str(path), hint="wait for it to end")
    return MachineError(f"the file cannot be locked: {error.strerror}", where=str(path))


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot write: {error.strerror}",
            where=str(path),
            hint="finished rows are kept; run again to continue",
        ) from error

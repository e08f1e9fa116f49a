"""The one place that prints. Results go to stdout, everything else to stderr.

Names and texts come from files that others made: what could steer a terminal is shown as an escape.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specctl import __version__
from specctl.errors import EXIT_BUG, EXIT_NO, EXIT_YES, MachineError, SpecctlError
from specctl.files.jsonfile import to_json

LONGEST_VALUE = 2000


class ReaderLeft(Exception):
    """The reader of our output went away (`| head`). No OSError: typer would make it exit 1."""


class Results(io.TextIOWrapper):
    """stdout whose failures are ours to tell, whoever writes to it.

    Raises ReaderLeft, or MachineError when the device refuses.
    """

    def write(self, text: str) -> int:
        with _told():
            return super().write(text)

    def flush(self) -> None:
        with _told():
            super().flush()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise ReaderLeft from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise MachineError(f"the results cannot be written: {reason}", where="stdout") from None


def take_streams() -> None:
    """Make stdout tell its failures, and fill closed streams. Raises MachineError when stdout is closed.

    The number of a closed stream would go to the next file that is opened, and a library's warning into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
        hint = "send them to a file, or to /dev/null if only the exit code counts"
        raise MachineError("the results cannot be written: the stream is closed", where="stdout", hint=hint)
    if isinstance(sys.stdout, io.TextIOWrapper):
        old = sys.stdout
        settings = (old.encoding, old.errors, None, old.line_buffering, old.write_through)
        sys.stdout = Results(old.detach(), *settings)


def finish_streams(code: int) -> int:
    """Flush, and return the exit code: `code`, unless the results of a run that was fine were lost."""
    try:
        sys.stdout.flush()
    except ReaderLeft:
        _silence(1)
    except MachineError as error:
        _silence(1)
        if code in (EXIT_YES, EXIT_NO):
            show_error(error)
            code = error.exit_code
    try:
        sys.stderr.flush()
    except OSError:
        _silence(2)
    return code


def _silence(number: int) -> None:
    """What is left in the buffer of a stream would be tried again, and complained of, when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def show_json(command: str, ok: bool, report: Any) -> None:
    """One JSON object on stdout; field names are those of the report's dataclass."""
    record = {"specctl": __version__, "command": command, "ok": ok, "report": report}
    text = to_json(record)
    # JSON has an escape of its own for what a terminal would obey; above plane 0 it takes two.
    _write(text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def show_lines(lines: Sequence[str]) -> None:
    """Plain lines on stdout."""
    for line in lines:
        _write(line)


def show_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns on a terminal (numbers to the right), tab-separated when piped."""
    if not is_terminal():
        show_lines(["\t".join(line) for line in (header, *rows)])
        return
    show_lines(aligned(header, rows))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table as lines of aligned text."""
    table = [list(map(str.upper, header)), *map(list, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    is_number = [all(_is_numeric(row[i]) for row in rows) for i in range(len(header))]
    return [
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, is_number, strict=True)).rstrip()
        for line in table
    ]


def is_terminal() -> bool:
    """Whether results are read by a person: programs get tab-separated fields."""
    return sys.stdout.isatty()


def wrapped(text: str, indent: str = "") -> list[str]:
    """`text` as lines of the terminal's width, at most 100; one whole line where a program reads."""
    if not is_terminal():
        return [text]
    width = max(40, min(100, shutil.get_terminal_size().columns))
    hanging = indent + ("  " if indent else "")
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def show_pairs(pairs: Mapping[str, str]) -> None:
    """`key  value` lines, aligned on a terminal and tab-separated when piped; values are not endless."""
    width = max(map(len, pairs), default=0)
    tty = is_terminal()
    show_lines([f"{k.ljust(width)}  {_cut(v)}" if tty else f"{k}\t{_cut(v)}" for k, v in pairs.items()])


def show_error(error: SpecctlError) -> None:
    """`error:` sentence, place, blank line, `hint:`; with a traceback only when asked for."""
    _complain(f"error: {_cut(error.message)}")
    if error.where:
        _complain(f"  in {_cut(error.where)}")
    if error.hint:
        _complain(f"\nhint: {_cut(error.hint)}")
    if os.environ.get("SPECCTL_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)


def show_bug(error: BaseException) -> int:
    """Say that this is ours; returns the exit code."""
    _complain(f"error: this is a bug in specctl: {type(error).__name__}: {error}")
    if os.environ.get("SPECCTL_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    else:
        _complain("\nhint: run again with SPECCTL_DEBUG=1 and report what it prints")
    return EXIT_BUG


def say(message: str) -> None:
    """A line of talk on stderr."""
    _complain(message)


def human_bytes(size: int) -> str:
    """`1.5 MiB`."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def human_time(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = int(seconds + 0.5)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _is_numeric(text: str) -> bool:
    return text[:1].isdigit() or text in ("-", "") or (text[:1] in "+-." and text[1:2].isdigit())


def _cut(text: str) -> str:
    """`text` that quotes a foreign file, which may hold a list of a million ids."""
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def _write(line: str) -> None:
    sys.stdout.write(_printable(line, sys.stdout.encoding, kept="\t") + "\n")


def _complain(text: str) -> None:
    # Talk that cannot be shown is lost; the exit code still says how it went.
    with contextlib.suppress(OSError):
        sys.stderr.write(_printable(text, sys.stderr.encoding, kept="\t\n") + "\n")


def _printable(text: str, encoding: str | None, *, kept: str) -> str:
    """`text` with escapes for what is no text but `kept`, and for what the stream cannot encode.

    Lone surrogates come from file names and data, terminal sequences from names in foreign files.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)
    return text.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")

"""The one place that prints. Results go to stdout, everything else to stderr."""

import dataclasses
import json
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from specctl import __version__
from specctl.errors import EXIT_BUG, SpecctlError


def show_json(command: str, ok: bool, report: Any) -> None:
    """One JSON object on stdout; field names are those of the report's dataclass."""
    body = dataclasses.asdict(report) if dataclasses.is_dataclass(report) and not isinstance(report, type) else report
    record = {"specctl": __version__, "command": command, "ok": ok, "report": body}
    _write(json.dumps(record, ensure_ascii=False, default=str))


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
    """`key  value` lines, aligned on a terminal and tab-separated when piped."""
    width = max(map(len, pairs), default=0)
    tty = is_terminal()
    show_lines([f"{k.ljust(width)}  {v}" if tty else f"{k}\t{v}" for k, v in pairs.items()])


def show_error(error: SpecctlError) -> None:
    """`error:` sentence, place, blank line, `hint:`; with a traceback only when asked for."""
    _complain(f"error: {error.message}")
    if error.where:
        _complain(f"  in {error.where}")
    if error.hint:
        _complain(f"\nhint: {error.hint}")
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


def _write(line: str) -> None:
    sys.stdout.write(_printable(line, sys.stdout.encoding) + "\n")


def _complain(line: str) -> None:
    sys.stderr.write(_printable(line, sys.stderr.encoding) + "\n")


def _printable(line: str, encoding: str | None) -> str:
    """`line` without what the stream cannot encode (lone surrogates in file names and data)."""
    return line.encode(encoding or "utf-8", "backslashreplace").decode(encoding or "utf-8")

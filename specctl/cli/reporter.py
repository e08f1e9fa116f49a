"""Progress on stderr: a live bar on a terminal, a line now and then elsewhere, nothing when quiet."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specctl.cli.output import human_time, say

LINE_EVERY_S = 15.0


class StderrReporter:
    """Satisfies records.progress.Reporter."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._bar: Progress | None = None
        self._bar_task: TaskID | None = None
        self._task, self._unit = "", ""
        self._total: int | None = None
        self._began = self._last_line = 0.0
        self._done = self._before = 0

    def start(self, task: str, total: int | None, unit: str, done: int = 0) -> None:
        self.stop()
        self._task, self._total, self._unit = task, total, unit
        self._done = self._before = done
        self._began = self._last_line = time.monotonic()
        if self._is_quiet or not sys.stderr.isatty():
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar_task = self._bar.add_task(task, total=total, completed=done, amount="")
        self._bar.start()

    def advance(self, amount: int) -> None:
        self._done += amount
        if self._bar is not None and self._bar_task is not None:
            self._bar.update(self._bar_task, completed=self._done, amount=self._amount())
        elif not self._is_quiet and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            say(f"{self._task}: {self._amount()}{self._time_left()}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def note(self, message: str) -> None:
        if not self._is_quiet:
            self._say(message)

    def warn(self, message: str) -> None:
        self._say(f"warning: {message}")

    def _say(self, message: str) -> None:
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        else:
            say(message)

    def _rate(self) -> float:
        return (self._done - self._before) / max(time.monotonic() - self._began, 1e-9)

    def _amount(self) -> str:
        of = f"/{self._total:,}" if self._total is not None else ""
        rate = self._rate()
        return f"{self._done:,}{of} {self._unit}, {rate:,.{0 if rate >= 10 else 2}f}/s"

    def _time_left(self) -> str:
        if self._total is None or self._rate() == 0:
            return ""
        return f", {human_time((self._total - self._done) / self._rate())} left"

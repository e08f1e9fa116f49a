"""How long work tells what it does, without knowing a terminal."""

from collections.abc import Callable
from typing import Any, Protocol


class Reporter(Protocol):
    """Where a recipe sends its talk. Nothing sent here is a result."""

    def start(self, task: str, total: int | None, unit: str, done: int = 0) -> None:
        """A measured stretch of work begins, `done` of `total` units already there."""

    def advance(self, amount: int) -> None:
        """`amount` more units of the current work are done."""

    def stop(self) -> None:
        """The current work ends."""

    def note(self, message: str) -> None:
        """Something worth a line."""

    def warn(self, message: str) -> None:
        """Something the user should see even when quiet."""


class SilentReporter:
    """Says nothing; for library use and tests."""

    def start(self, task: str, total: int | None, unit: str, done: int = 0) -> None: ...

    def advance(self, amount: int) -> None: ...

    def stop(self) -> None: ...

    def note(self, message: str) -> None: ...

    def warn(self, message: str) -> None: ...


class ForwardingReporter:
    """Turns each call into `(method, arguments)` for another process to replay."""

    def __init__(self, send: Callable[[tuple[str, tuple[Any, ...]]], None]) -> None:
        self._send = send

    def start(self, task: str, total: int | None, unit: str, done: int = 0) -> None:
        self._send(("start", (task, total, unit, done)))

    def advance(self, amount: int) -> None:
        self._send(("advance", (amount,)))

    def stop(self) -> None:
        self._send(("stop", ()))

    def note(self, message: str) -> None:
        self._send(("note", (message,)))

    def warn(self, message: str) -> None:
        self._send(("warn", (message,)))

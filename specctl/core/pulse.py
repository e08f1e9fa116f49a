"""Whether this process gets on with its work: a thread beside it may ask, and tell whoever watches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 3.0
"""How many times slower than the slowest step so far, token for token, a step may be."""


class Pulse:
    """Steps of work, timed by the tokens they read. Waiting for another rank is no step.

    A prompt is read faster, token for token, than a few drafted ones are: what a short step took bounds a long one.
    """

    def __init__(self) -> None:
        self._step: tuple[float, int] | None = None
        self._slowest: float | None = None

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Around the work on so many tokens."""
        began = time.monotonic()
        self._step = (began, tokens)
        yield
        self._step = None
        self._slowest = max(self._slowest or 0.0, (time.monotonic() - began) / tokens)

    def stuck_for(self, silence_s: float) -> float | None:
        """The seconds since the step under way began, where it should have ended by now; else None.

        A first step is given all the time it takes.
        """
        step, slowest = self._step, self._slowest
        if step is None or slowest is None:
            return None
        seconds = time.monotonic() - step[0]
        return seconds if seconds > silence_s + PATIENCE * slowest * step[1] else None


PULSE = Pulse()
"""That of this process."""

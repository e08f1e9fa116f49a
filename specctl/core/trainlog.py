"""The log of a training run: JSON lines always, TensorBoard or Weights & Biases beside it when asked for."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from specctl.errors import MachineError, UsageError
from specctl.files.jsonfile import to_json
from specctl.records.training import LOG_FILE

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Names of `--log`, and the package each needs."""

LONGEST_LINE = 1 << 20
"""More than any line of the log is long, in bytes."""


class Sink(Protocol):
    """Another place that numbers go to."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of one step."""

    def close(self) -> None:
        """No more numbers come."""


class RunLog:
    """The log of a run's lead; a run that goes on appends. Use it in a `with` block. Raises MachineError."""

    def __init__(self, out: Path, sink: str | None) -> None:
        self._path = out / LOG_FILE
        try:
            _cut_unfinished(self._path)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from error
        self._sink = open_sink(sink, out) if sink is not None else None

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """One line of JSON, and its numbers to the sink. Raises MachineError."""
        try:
            self._file.write(to_json({"kind": kind, **record}) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        if self._sink is not None:
            self._sink.write(kind, int(record["step"]), numbers_of(record))

    def _unwritable(self, error: OSError) -> MachineError:
        return MachineError(
            f"the log cannot be written: {error.strerror}",
            where=str(self._path),
            hint="`--resume` goes on from the last checkpoint once it can",
        )

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what a full disk left in the buffer; `write` has said so
            self._file.close()
        if self._sink is not None:
            self._sink.close()


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, those of a depth by its number, as in `accuracy_0`."""
    numbers = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
    for depth in record.get("depths", ()):
        numbers |= {f"{name}_{depth['depth']}": float(value) for name, value in depth.items() if name != "depth"}
    return numbers


def _cut_unfinished(path: Path) -> None:
    """Drop a last line without its end, which the next line would be written into. Raises OSError."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        length = min(size, LONGEST_LINE)
        file.seek(size - length)
        tail = file.read(length)
        if tail and not tail.endswith(b"\n"):
            file.truncate(size - length + tail.rfind(b"\n") + 1)


def require_sink(name: str | None) -> None:
    """Raises UsageError for a sink that there is not, or whose package is not installed."""
    if name is None:
        return
    if name not in SINKS:
        raise UsageError(f"`--log {name}` is none", hint=f"it is {' or '.join(SINKS)}; log.jsonl is always written")
    try:
        importlib.import_module(SINKS[name])
    except ImportError:
        raise UsageError(
            f"`--log {name}` needs the package `{SINKS[name]}`", hint=f"pip install {SINKS[name]}"
        ) from None


def open_sink(name: str, out: Path) -> Sink:
    """The sink called `name`."""
    return _TensorBoard(out) if name == "tensorboard" else _WeightsAndBiases(out)


class _TensorBoard:
    def __init__(self, out: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(out / "tensorboard"))

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, out: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project="specctl", dir=str(out), name=out.name, resume="allow")

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._run.finish()

"""The log of a training run: JSON lines always, TensorBoard or Weights & Biases beside it when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from specctl.errors import UsageError
from specctl.files.jsonfile import to_json
from specctl.records.training import LOG_FILE

SINKS = {"tensorboard": "tensorboard", "wandb": "wandb"}
"""Names of `--log`, and the package each needs."""


class Sink(Protocol):
    """Another place that numbers go to."""

    def write(self, kind: str, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of one step."""

    def close(self) -> None:
        """No more numbers come."""


class RunLog:
    """The log of a run's lead; a run that goes on appends. Use it in a `with` block."""

    def __init__(self, out: Path, sink: str | None) -> None:
        self._file = (out / LOG_FILE).open("a", encoding="utf-8")
        self._sink = open_sink(sink, out) if sink is not None else None

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """One line of JSON, and its numbers to the sink."""
        self._file.write(to_json({"kind": kind, **record}) + "\n")
        self._file.flush()
        if self._sink is not None:
            numbers = {key: float(value) for key, value in record.items() if isinstance(value, (int, float))}
            self._sink.write(kind, int(record["step"]), numbers)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._sink is not None:
            self._sink.close()


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

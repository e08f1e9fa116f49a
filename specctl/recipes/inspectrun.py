"""What a training run has done so far, from its log, as numbers and as a picture. Reads no weights."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specctl.errors import InputError, MachineError, UsageError
from specctl.files.jsonfile import read_json
from specctl.records.training import LOG_FILE, RUN_FILE, DepthScore, Evaluation

PICTURES: Final = (".svg", ".png")


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run by its log. `losses` are (step, mean loss in nats); `evaluations` in order of steps."""

    path: str
    target: str
    kind: str
    steps: int
    tokens: int
    bad_samples: int
    seconds: float
    losses: tuple[tuple[int, float], ...]
    evaluations: tuple[Evaluation, ...]
    best: Evaluation | None
    picture: str | None = None


def is_run(folder: Path) -> bool:
    """Whether `specctl train` made this folder."""
    return (folder / RUN_FILE).is_file()


def inspect_run(folder: Path, picture: str | None = None) -> RunReport:
    """Read a run's log, and draw it into `picture` (.svg or .png) if one is named.

    A run that was resumed has steps twice; the later line counts. Raises InputError for a log that is
    none, UsageError for another kind of picture.
    """
    settings, _ = read_json(folder / RUN_FILE)
    losses: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, Evaluation] = {}
    for record in _records(folder / LOG_FILE):
        if record["kind"] == "eval":
            evaluations[record["step"]] = _evaluation(record)
        else:
            losses[record["step"]] = record
    last = losses[max(losses)] if losses else {}
    scored = tuple(evaluations[step] for step in sorted(evaluations))
    config = settings.get("settings")
    config = config if isinstance(config, dict) else {}
    report = RunReport(
        path=str(folder),
        target=str(config.get("target")),
        kind="P-EAGLE" if config.get("parallel_drafting") else "EAGLE-3",
        steps=int(last.get("step", 0)),
        tokens=int(last.get("tokens", 0)),
        bad_samples=int(last.get("bad_samples", 0)),
        seconds=float(last.get("seconds", 0.0)),
        losses=tuple((step, _number(losses[step]["loss"])) for step in sorted(losses)),
        evaluations=scored,
        best=max(scored, key=lambda e: e.acceptance_length, default=None),
        picture=picture,
    )
    if picture is not None:
        draw(report, Path(picture))
    return report


def _number(value: Any) -> float:
    """A number of the log, where null stands for one that is not finite."""
    return math.nan if value is None else float(value)


def _evaluation(record: dict[str, Any]) -> Evaluation:
    """Raises KeyError, TypeError or ValueError for a record of another form."""
    depths = tuple(DepthScore(**{**depth, "loss": _number(depth["loss"])}) for depth in record["depths"])
    step, tokens = record["step"], record["tokens"]
    return Evaluation(step, tokens, _number(record["loss"]), _number(record["acceptance_length"]), depths)


def _require_numbers(record: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError for a line that `specctl train` does not write."""
    if not isinstance(record["step"], int) or record["kind"] not in ("train", "eval"):
        raise ValueError(record)
    _number(record["loss"])
    if record["kind"] == "eval":
        _evaluation(record)


def _records(path: Path) -> list[dict[str, Any]]:
    """The log's lines; a last line that was cut by a kill is left out. Raises InputError."""
    records = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the log cannot be read: {error}", where=str(path)) from error
    for number, line in enumerate(lines):
        try:
            record = json.loads(line)
            _require_numbers(record)
            records.append(record)
        except (ValueError, KeyError, TypeError):
            if number + 1 < len(lines):
                raise InputError(f"line {number + 1} of the log is none", where=str(path)) from None
    return records


def draw(report: RunReport, path: Path) -> None:
    """Loss over steps, and the simulated acceptance length beside it. Raises UsageError, MachineError."""
    if path.suffix not in PICTURES:
        raise UsageError(f"`--plot {path}` is neither .svg nor .png")
    try:
        import matplotlib
    except ImportError:
        raise UsageError("`--plot` needs the package `matplotlib`", hint="pip install 'specctl[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    finite = [(step, loss) for step, loss in report.losses if math.isfinite(loss)]
    left.plot(*zip(*finite, strict=True), linewidth=1, label="training") if finite else None
    held = [(e.step, e.loss) for e in report.evaluations]
    left.plot(*zip(*held, strict=True), marker="o", label="held out") if held else None
    left.set(xlabel="step", ylabel="loss (nats)", title=f"{report.kind} draft")
    right.plot([e.step for e in report.evaluations], [e.acceptance_length for e in report.evaluations], marker="o")
    right.set(xlabel="step", ylabel="acceptance length, simulated", title="held out")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if finite or held:
        left.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise MachineError(f"the picture cannot be written: {error.strerror}", where=str(path)) from error
    finally:
        pyplot.close(figure)

"""`specctl inspect`: signature -> recipe -> output."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli import options
from specctl.cli.output import human_bytes, human_time, show_json, show_lines, show_pairs, show_table
from specctl.cli.reporter import StderrReporter
from specctl.errors import UsageError

EXAMPLES = (
    "specctl inspect states",
    "specctl inspect states --compare states-pp2",
    "specctl inspect ./SmolLM2 --json",
)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="inspect", epilog=options.epilog(EXAMPLES), no_args_is_help=True)(inspect)


def inspect(
    context: typer.Context,
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="Shard folder, training run, or a target's folder, hub id or GGUF file."),
    ],
    compare: Annotated[
        str | None, typer.Option(help="Another shard folder; exit 1 unless both store the same states.")
    ] = None,
    rounding: Annotated[
        bool, typer.Option("--rounding", help="With --compare: states that only rounding tells apart are the same.")
    ] = False,
    sample: Annotated[int, typer.Option(help="Number of the sample to show as text.")] = 0,
    target: Annotated[
        str | None, typer.Option(help="Target whose tokenizer renders the sample, if it has moved.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw a training run's loss and acceptance as .svg or .png.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the target's folder brings.")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Show what shards, a training run or a target hold, or compare shards."""
    from specctl.recipes import inspect as recipe
    from specctl.recipes.inspectrun import inspect_run, is_run

    if is_run(Path(path)):
        ignored = [
            name
            for name in ("compare", "rounding", "sample", "target", "trust_remote_code")
            if options.is_given(context, name)
        ]
        if ignored:
            raise UsageError(f"`--{ignored[0]}` has no meaning for a training run", where=path)
        # matplotlib wants a folder for its cache, and home may not be writable.
        os.environ.setdefault("MPLCONFIGDIR", tempfile.gettempdir())
        run = inspect_run(Path(path), plot)
        if json:
            show_json("inspect", True, run)
        else:
            _show_run(run)
        return 0
    if plot is not None:
        raise UsageError("`--plot` draws training runs", where=path, hint="name the folder given to `train --out`")

    reporter = StderrReporter(is_quiet=quiet)
    if compare is not None:
        compared = recipe.compare(path, compare, reporter)
        is_same = compared.is_near if rounding else compared.is_equal
        if json:
            show_json("inspect", is_same, compared)
        else:
            _show_comparison(compared)
        return 0 if is_same else 1
    if rounding:
        raise UsageError("`--rounding` has a meaning only with `--compare`", where=path)
    report = recipe.inspect(path, reporter, sample=sample, target=target, trust_remote_code=trust_remote_code)
    if json:
        show_json("inspect", True, report)
    elif isinstance(report, recipe.TargetReport):
        _show_target(report)
    else:
        _show_folder(report)
    return 0


def _show_run(report: Any) -> None:
    pairs = {
        "run": f"{report.kind} draft for {report.target}",
        "steps": f"{report.steps:,} in {human_time(report.seconds)}, {report.tokens:,} tokens",
        "loss": f"{report.losses[0][1]:.4f} -> {report.losses[-1][1]:.4f} nats" if report.losses else "no step yet",
    }
    if report.best is not None:
        pairs["best"] = (
            f"acceptance length {report.best.acceptance_length:.3f} (simulated) at step {report.best.step:,}"
        )
    if report.picture:
        pairs["picture"] = report.picture
    show_pairs(pairs)
    if report.evaluations:
        show_lines([""])
        rows = [
            (
                f"{e.step}",
                f"{e.loss:.4f}",
                f"{e.acceptance_length:.3f}",
                " ".join(f"{d.accuracy:.2f}" for d in e.depths),
            )
            for e in report.evaluations
        ]
        show_table(("step", "held-out loss", "acceptance", "right by token"), rows)


def _show_comparison(report: Any) -> None:
    show_table(
        ("slot", "agreement", "min cosine", "max difference", "of a state"),
        [
            (
                m.slot,
                "bit-equal" if m.is_equal else "differs",
                f"{m.min_cosine:.7f}",
                f"{m.max_difference:.3g}",
                f"{m.max_relative:.2g}",
            )
            for m in report.slots
        ],
    )
    missing = f", {report.missing} only in one" if report.missing else ""
    verdict = "equal" if report.is_equal else "equal but for rounding" if report.is_near else "different"
    show_lines([f"{report.samples:,} samples in both{missing}: {verdict}"])


def _show_target(report: Any) -> None:
    fields = asdict(report)
    fields["weights_bytes"] = human_bytes(report.weights_bytes)
    fields["is_tied"] = "yes" if report.is_tied else "no"
    fields["quantization"] = report.quantization or "none"
    show_pairs({key.replace("_", " "): str(value) for key, value in fields.items()})


def _show_folder(report: Any) -> None:
    show_pairs(
        {
            "target": report.target,
            "state": "complete" if report.is_complete else "unfinished: run its `specctl extract` again",
            "samples": f"{report.samples:,}",
            "tokens": f"{report.tokens:,}, {report.supervised_tokens:,} supervised",
            "stored": f"{report.shards} {report.format} shards of {report.dtype}, {human_bytes(report.bytes)}",
            "dropped": ", ".join(f"{reason} {count}" for reason, count in report.drops.items()) or "none",
        }
    )
    show_lines([""])
    rows = [(s.slot, f"{s.mean_norm:.4g}", f"{s.rms:.4g}", f"{s.max_abs:.4g}") for s in report.stats]
    show_table(("slot", "mean norm", "rms", "max abs"), rows)
    if report.sample is not None:
        view = report.sample
        show_lines(
            ["", f"sample {view.sample_id}, {view.tokens} tokens, {view.supervised_tokens} supervised in >>> <<<", ""]
        )
        text = "".join(f">>>{text}<<<" if supervised else text for text, supervised in view.spans)
        show_lines(text.splitlines())

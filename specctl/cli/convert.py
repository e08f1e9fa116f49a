"""`specctl convert`: signature -> config -> recipe -> output."""

from __future__ import annotations

import json as jsonlib
import sys
import textwrap
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from specctl import plugins
from specctl.cli import options
from specctl.cli.output import human_bytes, show_json, show_lines, show_pairs, show_table
from specctl.cli.reporter import StderrReporter

EXAMPLES = (
    "specctl convert ./my-draft ./for-vllm --to vllm",
    "specctl convert ./my-draft ./for-sglang --to sglang --target Qwen/Qwen3-8B --dry-run",
    "specctl convert ./nemo-head ./spec --to speculators --target ./Qwen3-8B --aux-layers aux --num-draft-tokens 5",
)
LAYOUTS = ", ".join(plugins.names("formats"))
WIDTH = 78
WIDEST_VALUE = 60


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="convert", epilog=options.epilog(EXAMPLES), no_args_is_help=True)(convert)


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Draft to convert: a folder, a weights file or a hub id.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; it must be new or empty.")],
    to: Annotated[
        str,
        typer.Option(help=f"Layout to write: {LAYOUTS}."),
    ],
    from_: Annotated[
        str | None, typer.Option("--from", help="Layout of SRC, where it is not recognised or taken for another.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Large model that the draft guesses for: folder or hub id. Gives the tables a layout needs and "
            "the draft shares, the length and the number of layers."
        ),
    ] = None,
    aux_layers: Annotated[
        str | None,
        typer.Option(
            help="Layers of the target that the draft reads, where SRC does not say: `2,18,33`, the number of "
            "layers run before each, in the order of its columns; or `aux`, the default of --target."
        ),
    ] = None,
    source_layer_convention: Annotated[
        str | None,
        typer.Option(
            help="How SRC counts its layers, where it can be read in two ways: boundary (layers run before) or "
            "output (number, from 0, of the layer whose output is read)."
        ),
    ] = None,
    norm_before_residual: Annotated[
        bool | None,
        typer.Option(
            "--norm-before-residual/--no-norm-before-residual",
            help="Whether the draft's first layer adds the normed state, where SRC does not say.",
        ),
    ] = None,
    norm_output: Annotated[
        bool | None,
        typer.Option(
            "--norm-output/--no-norm-output",
            help="Whether the draft feeds its normed state to its next step, where SRC does not say.",
        ),
    ] = None,
    mask_token: Annotated[
        int | None,
        typer.Option(help="Token id that stands for a token not known yet in a P-EAGLE draft, where SRC has none."),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted at a time, where the layout wants it and SRC has none.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Rewrite a draft for another trainer or runtime.

    A draft is a small model that guesses the next tokens of a large one, the target. Each project that trains
    or serves such drafts names the tensors and settings of their checkpoints (the layout) in its own way.
    Tensors keep their bytes and types; what a layout cannot hold is an error, and nothing is guessed.
    """
    from specctl.recipes.convert import ConvertConfig
    from specctl.recipes.convert import convert as run

    config = ConvertConfig(
        source=source,
        out=out,
        to=to,
        target=target,
        from_layout=from_,
        source_layer_convention=source_layer_convention,
        aux_layers=aux_layers,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
        mask_token=mask_token,
        num_draft_tokens=num_draft_tokens,
        dry_run=dry_run,
    )
    report = run(config, StderrReporter(is_quiet=quiet))
    if json:
        show_json("convert", True, report)
    else:
        _show(report)
    return 0


def _show(report: Any) -> None:
    layers = ", ".join(map(str, report.aux_ids)) if report.aux_ids is not None else "the readers' default"
    show_pairs(
        {
            "from": f"{report.from_layout}, {report.source}",
            "to": f"{report.to}, {report.out}{'' if report.written else ' (dry run: nothing written)'}",
            "layers read": layers,
            "tensors": f"{len(report.trace)}, {human_bytes(report.bytes)}",
        }
    )
    show_lines([""])
    if sys.stdout.isatty():
        show_table(("tensors", "count", "change", "source"), grouped(report.trace))
    else:
        show_table(("tensor", "change", "source"), [(row.name, row.change, row.source) for row in report.trace])
    _list("left out", (f"{row.name}: {row.reason}" for row in report.dropped))
    _list("config.json", (f"{row.key}: {_value(row.before)} -> {_value(row.after)}" for row in report.changes))
    _list("notes", report.notes)


def grouped(trace: Iterable[Any]) -> list[tuple[str, str, str, str]]:
    """One row for all tensors that share the change, the file and how their names begin, here and there."""
    groups: dict[tuple[str, str, str, str], list[Any]] = {}
    for row in trace:
        place, _, name = row.source.rpartition(": ")
        new, old = row.name.split("."), name.split(".")
        while new and old and new[-1] == old[-1]:
            del new[-1], old[-1]
        groups.setdefault((".".join(new), row.change, place, ".".join(old)), []).append(row)
    rows = []
    for (new_start, change, place, old_start), found in groups.items():
        if len(found) == 1:
            rows.append((found[0].name, "1", change, found[0].source))
        else:
            here, there = (f"{start}.*".lstrip(".") for start in (new_start, old_start))
            rows.append((here, str(len(found)), change, f"{place}: {there}"))
    return rows


def _list(title: str, items: Iterable[str]) -> None:
    lines = list(items)
    if lines:
        show_lines(["", title])
        for line in lines:
            show_lines(
                textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
            )


def _value(value: Any) -> str:
    text = "-" if value is None else jsonlib.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST_VALUE else f"{text[: WIDEST_VALUE - 3]}..."

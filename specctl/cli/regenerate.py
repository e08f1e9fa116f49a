"""`specctl regenerate`: from flags to the recipe, and from its report to lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.options import ConfigFile, Json, Quiet, api_key_of, build, epilog
from specctl.cli.output import human_time, show_json, show_pairs
from specctl.cli.reporter import StderrReporter

if TYPE_CHECKING:
    from specctl.records.regeneration import RegenerateReport

EXAMPLES: tuple[str, ...] = (
    "specctl regenerate ./target prompts.jsonl --out answers.jsonl",
    "specctl regenerate ./target prompts.jsonl --out answers.jsonl --temperature 0.7 --drop-truncated",
    "specctl regenerate my-model prompts.jsonl --out answers.jsonl --endpoint http://localhost:8000/v1",
)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("regenerate", epilog=epilog(EXAMPLES), no_args_is_help=True)(_regenerate)


def _regenerate(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Model whose answers are wanted: a folder, a hub id or a GGUF file.")
    ],
    prompts: Annotated[
        list[str],
        typer.Argument(
            metavar="PROMPTS", help="Questions or conversations: JSONL, JSON or Parquet files, or - for stdin."
        ),
    ],
    out: Annotated[str | None, typer.Option(help="Write the conversations to this JSONL file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Cut an answer after so many tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="Draw tokens at this temperature; 0 takes the likeliest.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that sum to this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws, when --temperature is above 0.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Stop after so many conversations.")] = None,
    drop_truncated: Annotated[
        bool, typer.Option("--drop-truncated", help="Leave out conversations whose last answer was cut.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help="Answer so many conversations at once (16 when not given).")] = None,
    dtype: Annotated[str, typer.Option(help="Compute in auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="Compute on auto, cpu, cuda or cuda:N.")] = "auto",
    chat_template: Annotated[
        str | None, typer.Option(help="Use the chat template in this file instead of the model's own.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the model's folder.")
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(help="Ask the OpenAI-compatible server at this URL; TARGET is then its model's name."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Send so many requests to the endpoint at once (8 when not given).")
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Read the endpoint's API key from this environment variable, not OPENAI_API_KEY."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Throw away what is at --out and start again.")
    ] = False,
    config: ConfigFile = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model's own answers to a set of questions.

    A draft learns to guess what its target says, and it does so best from the target's own words.
    Questions stay, every answer in the input is replaced, and the result is data for
    `specctl extract`. An interrupted run continues where it stopped when it is started again.
    """
    flags = {
        "target": target,
        "prompts": tuple(prompts),
        "out": out,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "limit": limit,
        "drop_truncated": drop_truncated,
        "batch": batch,
        "dtype": dtype,
        "device": device,
        "chat_template": chat_template,
        "trust_remote_code": trust_remote_code,
        "endpoint": endpoint,
        "concurrency": concurrency,
        "api_key_env": api_key_env,
        "overwrite": overwrite,
    }
    from specctl.recipes.regenerate import regenerate
    from specctl.records.regeneration import RegenerateConfig

    settings = build(RegenerateConfig, context, flags, config)
    report = regenerate(settings, StderrReporter(is_quiet=quiet or json), api_key=api_key_of(settings))
    if json:
        show_json("regenerate", True, report)
    else:
        show_pairs(_pairs(report))


def _pairs(report: RegenerateReport) -> Mapping[str, str]:
    pairs = {
        "file": str(Path(report.out)),
        "conversations": f"{report.rows:,} ({report.new_rows:,} new)",
        "answers": f"{report.turns:,}",
        "truncated": f"{report.truncated:,}",
        "unanswered turns": f"{report.unanswered_turns:,}",
        "empty answers": f"{report.empty_answers:,}",
        "of other prompts": f"{report.other_rows:,}",
        "dropped": _reasons(report.drops),
        "failed": _reasons(report.failures),
        "time": human_time(report.seconds),
    }
    if report.tokens_per_s is not None:
        pairs["speed"] = f"{report.tokens_per_s:,.0f} tokens/s"
    always = ("file", "conversations", "answers", "truncated", "time", "speed")
    return {key: value for key, value in pairs.items() if key in always or value not in ("0", "")}


def _reasons(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())

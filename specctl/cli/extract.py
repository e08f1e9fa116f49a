"""`specctl extract`: signature -> config -> recipe -> output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli import options
from specctl.cli.output import human_bytes, human_time, show_json, show_pairs
from specctl.cli.reporter import StderrReporter
from specctl.errors import UsageError

EXAMPLES = (
    "specctl extract ./SmolLM2 chats.jsonl --out states",
    "specctl extract Qwen/Qwen3-8B chats.parquet --out states --layers aux,norm --pp 2",
    "specctl extract ./SmolLM2 --verify states",
)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="extract", epilog=options.epilog(EXAMPLES), no_args_is_help=True)(extract)


def extract(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="Model folder, hub id (owner/name), or a GGUF file or its folder."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA", help="JSONL, JSON or Parquet files of conversations; `-` reads JSONL from standard input."
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder to write; an unfinished one is continued. Needed unless --verify is given."),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            help="Comma-separated slots: ids (0 embeddings, b after b layers), `last`, `norm` (after the final "
            "norm), `all`, `aux` (2, N/2 and N-3, what an EAGLE-3 draft reads)."
        ),
    ] = "aux,norm",
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32: to run the target in and to store.")
    ] = "auto",
    format: Annotated[str, typer.Option(help="Shard files: safetensors or parquet.")] = "safetensors",
    compression: Annotated[
        str | None, typer.Option(help="zstd or none, for Parquet; zstd unless said otherwise.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Cut samples to this many tokens.")] = 2048,
    limit: Annotated[int | None, typer.Option(help="Take this many samples, drawn by --seed.")] = None,
    seed: Annotated[int, typer.Option(help="Order of the samples.")] = 0,
    batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens per forward pass; 2048 on CPU and 16384 on GPU unless given.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file or text used instead of the tokenizer's template.")
    ] = None,
    role_map: Annotated[
        list[str] | None, typer.Option(help="NAME=ROLE for a role name specctl does not know; repeatable.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    pp: Annotated[int, typer.Option(help="Pipeline stages: split the layers over this many processes.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks: split each layer over this many.")] = 1,
    engine: Annotated[str, typer.Option(help="reference (specctl's own) or vllm: what runs the target.")] = "reference",
    server_venv: options.ServerVenv = None,
    server_command: options.ServerCommand = None,
    server_args: options.ServerArgs = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be made; write nothing.")] = False,
    verify: Annotated[
        Path | None,
        typer.Option(help="Check this shard folder; with TARGET, also recompute a sample of it."),
    ] = None,
    allow_overflow: Annotated[
        bool, typer.Option("--allow-overflow", help="Drop samples that overflow float16 instead of stopping.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the model's folder brings.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what --out holds and start over.")] = False,
    config: options.ConfigFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Write a target's hidden states for chats to disk.

    A draft is trained on what its target computes at some layers, its hidden states. They are written as
    shards, files of many samples each. A run that was stopped continues when it is started again.
    """
    reporter = StderrReporter(is_quiet=quiet)
    if verify is not None:
        return _verify(context, verify, target, data, reporter, is_json=json)
    from specctl.records.extraction import ExtractConfig

    flags: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name in ExtractConfig.__dataclass_fields__ and value is not None
    }
    for name in ("data", "role_map"):
        if name in flags:
            flags[name] = tuple(flags[name])
    if dry_run:
        flags.setdefault("out", "no-folder-given")
    settings = options.build(ExtractConfig, context, flags, config)
    if dry_run:
        from specctl.recipes.dryrun import plan_only

        return _show("extract", plan_only(settings, reporter), is_json=json)
    from specctl.recipes.extract import extract as run

    report = run(settings, reporter)
    return 0 if report is None else _show("extract", report, is_json=json)


def _verify(
    context: typer.Context,
    folder: Path,
    target: str | None,
    data: list[str] | None,
    reporter: StderrReporter,
    *,
    is_json: bool,
) -> int:
    from specctl.recipes.verify import VerifyConfig, verify

    if data:
        raise UsageError("`--verify` takes no DATA", hint="`specctl extract [TARGET] --verify DIR`")
    given = [n for n in ("out", "layers", "format", "limit", "overwrite") if options.is_given(context, n)]
    if given:
        raise UsageError(f"`--verify` does not go with `--{given[0]}`")
    device = str(context.params["device"])
    trust = bool(context.params["trust_remote_code"])
    report = verify(VerifyConfig(str(folder), target, device=device, trust_remote_code=trust), reporter)
    if is_json:
        show_json("extract", report.ok, report)
    else:
        pairs = {"folder": report.folder, "shards": str(report.shards), "samples": f"{report.samples:,}"}
        pairs |= {"tokens": f"{report.tokens:,}", "checksums": "all match" if not report.faults else "see below"}
        pairs |= {f"slot {slot.slot}": slot.text() for slot in report.recomputed}
        pairs |= {f"logits from {name}": f"{gap:.2g} mean log-prob difference" for name, gap in report.logits.items()}
        pairs |= {f"fault {i + 1}": fault for i, fault in enumerate(report.faults)}
        show_pairs(pairs | {"verdict": "ok" if report.ok else "not ok"})
    return 0 if report.ok else 1


def _show(command: str, report: Any, *, is_json: bool) -> int:
    if is_json:
        show_json(command, True, report)
        return 0
    is_all = report.samples + sum(report.drops.values()) == report.rows
    rows = f" of {report.rows:,} rows" if is_all else f", {report.rows:,} rows read"
    asked = getattr(report, "asked", report.samples)
    if asked < report.samples:
        rows += f", {asked:,} asked for"
    cut = f", {report.truncated:,} cut to length" if report.truncated else ""
    pairs = {
        "samples": f"{report.samples:,}{rows}{cut}",
        "tokens": f"{report.tokens:,}, {report.supervised_tokens:,} supervised",
        "slots": f"{', '.join(report.slots)} in {report.dtype}",
        "shards": f"{report.shards} {report.format}",
    }
    if report.drops:
        pairs["dropped"] = ", ".join(f"{reason} {count}" for reason, count in report.drops.items())
    if hasattr(report, "bytes_per_slot"):
        pairs["bytes"] = f"{human_bytes(report.bytes)}, {human_bytes(report.bytes_per_slot)} per slot, uncompressed"
        pairs["free"] = human_bytes(report.free_bytes)
        pairs["time"] = f"{human_time(report.seconds)} at {report.tokens_per_s:,.0f} tokens/s, measured"
    else:
        pairs["bytes"] = human_bytes(report.bytes)
        pairs["time"] = f"{human_time(report.seconds)}, {report.tokens_per_s:,.0f} tokens/s start-up included"
        pairs["out"] = report.out
    show_pairs(pairs)
    return 0

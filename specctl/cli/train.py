"""`specctl train`: signature -> config -> recipe -> output."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from specctl.cli import options
from specctl.cli.output import human_bytes, human_time, show_json, show_pairs
from specctl.cli.reporter import StderrReporter

EXAMPLES = (
    "specctl train states --target ./SmolLM2 --out run",
    "specctl train states --target ./SmolLM2 --out run-p --parallel-drafting --ptd-token-id 16",
    "specctl train states --target ./SmolLM2 --out run --resume --config run.toml",
)


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="train", epilog=options.epilog(EXAMPLES), no_args_is_help=True)(train)


def train(
    context: typer.Context,
    shards: Annotated[
        list[str] | None, typer.Argument(metavar="SHARDS", help="Folders that `specctl extract` wrote.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Model the shards came from: folder, hub id or GGUF file. Only its embedding and head are read."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder of the run: log, checkpoints, and the draft to serve.")
    ] = None,
    parallel_drafting: Annotated[
        bool, typer.Option("--parallel-drafting", help="Train a P-EAGLE draft, which guesses all its tokens at once.")
    ] = False,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens the draft learns to guess ahead; 3, or 4 for P-EAGLE.")
    ] = None,
    ptd_token_id: Annotated[
        int | None, typer.Option(help="P-EAGLE: id that stands for tokens not known yet; one that occurs in no text.")
    ] = None,
    num_layers: Annotated[int, typer.Option(help="Decoder layers of the draft.")] = 1,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens the draft can propose, the most frequent ones; 32000 at most if not given."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers whose states it reads, as in `extract`; all that are stored if not given."),
    ] = None,
    depth_decay: Annotated[
        float | None, typer.Option(help="Weight of each further token against the one before; 0.6 if not given.")
    ] = None,
    cod_ratio: Annotated[
        float, typer.Option(help="P-EAGLE: share of positions trained on for each further token.")
    ] = 0.8,
    cod_floor: Annotated[float, typer.Option(help="P-EAGLE: the least share for any token.")] = 0.2,
    segments: Annotated[
        int, typer.Option(help="P-EAGLE: parts to compute a batch in; more need less memory and change no number.")
    ] = 1,
    loss: Annotated[
        str, typer.Option(help="What is learned. kl: the target's probabilities; ce: its likeliest token.")
    ] = "kl",
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many optimizer steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data; 1 unless --max-steps is given.")] = None,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens taken at once; several samples, or one that is longer.")
    ] = 2048,
    accumulate: Annotated[
        int, typer.Option(help="So many --batch-tokens for one optimizer step, over all processes.")
    ] = 1,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; 0.001 if not given.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute in auto, float32 or bfloat16; weights stay float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    eval_fraction: Annotated[float, typer.Option(help="Share of samples held out to measure on.")] = 0.05,
    eval_every: Annotated[int, typer.Option(help="Measure after so many steps.")] = 200,
    save_every: Annotated[int, typer.Option(help="Save after so many steps.")] = 500,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2,
    seed: Annotated[int, typer.Option(help="Order of the samples, first weights, sampled depths.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    init_from: Annotated[
        str | None, typer.Option(help="Start from this draft's weights and vocabulary, of any layout.")
    ] = None,
    log: Annotated[
        str | None, typer.Option(help="tensorboard or wandb, beside the log.jsonl that is always written.")
    ] = None,
    nproc: Annotated[int, typer.Option(help="Processes to start on this machine.")] = 1,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Share the draft out over the processes (FSDP2), to save memory.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many steps, how much memory and disk; write nothing.")
    ] = False,
    config: options.ConfigFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Train a draft, a small model that guesses the next tokens of a large one, its target.

    A server lets the target check several guessed tokens at once, which is faster than making them one by
    one. The draft learns from what `specctl extract` stored of the target: its hidden states. An EAGLE-3
    draft guesses one token after the other, a P-EAGLE draft all at once. A run that was stopped goes on
    with --resume, to the same weights. More settings (sizes, norms, schedule) go into a --config file.
    """
    from specctl.recipes.train import train as run
    from specctl.records.training import TrainConfig

    flags: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name in TrainConfig.__dataclass_fields__ and value is not None
    }
    if "shards" in flags:
        flags["shards"] = tuple(flags["shards"])
    if dry_run:
        flags.setdefault("out", "no-folder-given")
    settings = options.build(TrainConfig, context, flags, config)
    # A length on the command line takes the place of the other kind of length in the file.
    for given, other in (("max_steps", "epochs"), ("epochs", "max_steps")):
        if options.is_given(context, given) and not options.is_given(context, other):
            settings = replace(settings, **{other: None})  # type: ignore[arg-type]
    if dry_run:
        from specctl.recipes.trainplan import plan_training

        return _show_plan(plan_training(settings, StderrReporter(is_quiet=quiet)), is_json=json)
    report = run(settings, StderrReporter(is_quiet=quiet))
    if report is None:
        return 0
    if json:
        show_json("train", report.passes, report)
    else:
        _show(report)
    return 0 if report.passes else 1


def _show_plan(plan: Any, *, is_json: bool) -> int:
    if is_json:
        show_json("train", True, plan)
        return 0
    show_pairs(
        {
            "steps": f"{plan.steps:,}, {plan.rows:,} rows",
            "samples": f"{plan.samples:,} to train on, {plan.held_out:,} held out",
            "tokens": f"{plan.tokens:,} in one pass",
            "reads": f"boundaries {', '.join(map(str, plan.layers))}",
            "vocabulary": f"{plan.draft_vocab_size:,} tokens, {plan.coverage:.2%} of what the target said",
            "parameters": f"{plan.trained_parameters:,} trained of {plan.parameters:,}",
            "memory": f"about {human_bytes(plan.memory_bytes)} beside the libraries",
            "disk": f"about {human_bytes(plan.disk_bytes)}, {human_bytes(plan.free_bytes)} free",
        }
    )
    return 0


def _show(report: Any) -> None:
    pairs = {
        "steps": f"{report.steps:,} in {human_time(report.seconds)}",
        "tokens": f"{report.tokens:,}, {report.supervised_tokens:,} supervised",
        "samples": f"{report.samples:,} trained on, {report.held_out:,} held out",
        "parameters": f"{report.trained_parameters:,} trained of {report.parameters:,}",
        "loss": f"{report.loss:.4f} nats",
    }
    if report.bad_samples:
        pairs["left out"] = f"{report.bad_samples:,} samples with states that are not finite"
    if report.evaluation is not None:
        pairs["held out"] = (
            f"loss {report.evaluation.loss:.4f}, simulated acceptance length {report.evaluation.acceptance_length:.3f}"
        )
        for depth in report.evaluation.depths:
            pairs[f"token {depth.depth + 1}"] = f"{depth.accuracy:.1%} right, {depth.joint_rate:.1%} with all before it"
    if report.flat_gap is not None:
        pairs["as served"] = f"training and serving layouts differ by {report.flat_gap:.1g} of the logits"
    show_pairs(pairs | {"draft": report.draft, "check-ckpt": report.verdict})

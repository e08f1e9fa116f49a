"""`specctl eval`: signature -> config -> recipe -> output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specctl.cli import options
from specctl.cli.output import human_bytes, say, show_json, show_lines, show_pairs, show_table, wrapped
from specctl.cli.reporter import StderrReporter
from specctl.errors import UsageError

EXAMPLES = (
    "specctl eval ./SmolLM2 run/draft --prompts gsm8k --pp 1 --pp 2 --report eval.html",
    "specctl eval ./SmolLM2 run/draft --prompts mt-bench --limit 32 --engine vllm",
    "specctl eval --compare before.json after.json",
)
WITH_COMPARE = ("compare", "tolerance", "json", "quiet")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="eval", epilog=options.epilog(EXAMPLES), no_args_is_help=True)(evaluate)


def evaluate(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="The large model: folder, hub id or GGUF file.")
    ] = None,
    draft: Annotated[
        str | None, typer.Argument(metavar="DRAFT", help="Folder of the draft, in any checkpoint layout.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="mt-bench, humaneval, gsm8k, or a JSONL file of questions.")
    ] = None,
    pp: Annotated[list[int] | None, typer.Option(help="Pipeline stages; give it again to compare sizes.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens the draft guesses each time; as it was trained if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write for each prompt.")] = 64,
    limit: Annotated[int | None, typer.Option(help="So many prompts, drawn by --seed.")] = None,
    turns: Annotated[int, typer.Option(help="Questions of a conversation to answer, one after the other.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that make up this share.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0 is all.")] = 0,
    draft_sampling: Annotated[
        str, typer.Option(help="greedy: the draft guesses its likeliest token; sampled: it draws too.")
    ] = "greedy",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of an answer.")] = False,
    seed: Annotated[int, typer.Option(help="Which prompts, and what is drawn.")] = 0,
    batch: Annotated[int, typer.Option(help="Prompts decoded at once.")] = 1,
    tolerance: Annotated[float, typer.Option(help="Relative difference between sizes that counts as none.")] = 0.05,
    baseline: Annotated[
        bool,
        typer.Option("--baseline", help="Also time plain decoding, and measure guessing without a draft."),
    ] = False,
    no_spec: Annotated[bool, typer.Option("--no-spec", help="Decode plainly, without DRAFT.")] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A.json B.json", help="Judge two earlier --json results instead of measuring."),
    ] = None,
    report: Annotated[str | None, typer.Option(help="Write a page to look at, as in eval.html.")] = None,
    dtype: Annotated[str, typer.Option(help="auto (the target's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    engine: Annotated[str, typer.Option(help="reference (specctl's own), vllm or sglang: what decodes.")] = "reference",
    endpoint: Annotated[
        str | None,
        typer.Option(help="URL of a server that runs already; DRAFT then only names its draft, and may be left out."),
    ] = None,
    server_venv: options.ServerVenv = None,
    server_command: options.ServerCommand = None,
    server_args: options.ServerArgs = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the endpoint's API key; OPENAI_API_KEY unless given.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that the target's folder brings.")
    ] = False,
    config: options.ConfigFile = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Measure how many tokens a draft gains for each run of its target.

    A draft is a small model that guesses the next tokens of a large one, the target. The target answers the
    prompts while the draft guesses ahead, and keeps the guesses that it would have written itself. Acceptance
    length is the tokens gained by each run of the target: 1 means the draft never helps. With
    several --pp the sizes are compared on the same prompts: exit code 0 says that they agree within
    --tolerance, 1 that they do not, 3 that these prompts are too few to tell.
    """
    reporter = StderrReporter(is_quiet=quiet)
    if compare is not None:
        _refuse_more(context)
        return _compare(compare, tolerance, is_json=json)
    from specctl.recipes.evaluate import StoppedRun
    from specctl.recipes.evaluate import evaluate as run
    from specctl.recipes.judge import judge
    from specctl.records.evaluation import EvalConfig

    flags: dict[str, Any] = {
        name: value for name, value in locals().items() if name in EvalConfig.__dataclass_fields__ and value is not None
    }
    flags["pp"] = tuple(pp or (1,))
    flags.setdefault("draft", None)
    settings = options.build(EvalConfig, context, flags, config)
    cause = None
    try:
        result = run(settings, reporter, api_key=options.api_key_of(settings))
    except StoppedRun as stopped:
        result, cause = stopped.result, stopped.cause
    judgement = judge(result, tolerance=settings.tolerance)
    if json:
        is_yes = judgement.exit_code == 0 and cause is None
        show_json("eval", is_yes, {**result.to_dict(), "judgement": judgement})
    else:
        _show(judgement)
    if settings.report is not None:
        _write_page(settings, result, judgement)
        say(f"wrote {settings.report}")
    if cause is not None:
        raise cause
    return judgement.exit_code


def _write_page(settings: Any, result: Any, judgement: Any) -> None:
    from specctl.core.target import describe_target, load_tokenizer
    from specctl.recipes.report import write_report

    is_trusted = settings.trust_remote_code
    spec = describe_target(settings.target, revision=settings.revision, trust_remote_code=is_trusted, is_whole=False)
    tokenizer = load_tokenizer(spec, trust_remote_code=is_trusted)
    write_report(Path(settings.report), result, judgement, decode=tokenizer.decode)


def _refuse_more(context: typer.Context) -> None:
    """Raises UsageError for what `--compare` would have to ignore."""
    more = [name for name in context.params if name not in WITH_COMPARE and options.is_given(context, name)]
    if more:
        names = ", ".join(
            name.upper() if name in ("target", "draft") else f"`--{name.replace('_', '-')}`" for name in more
        )
        raise UsageError(f"`--compare` measures nothing and takes no {names}", hint="leave it out")


def _compare(files: tuple[Path, Path], tolerance: float, *, is_json: bool) -> int:
    from specctl.files.jsonfile import read_json
    from specctl.recipes.judge import compare
    from specctl.records.evaluationfile import result_from_dict

    first, second = (result_from_dict(read_json(path, 1 << 30)[0], str(path)) for path in files)
    judgement = compare(first, second, tolerance=tolerance, names=(files[0].name, files[1].name))
    if is_json:
        show_json("eval", judgement.exit_code == 0, judgement)
    else:
        _show(judgement)
    return judgement.exit_code


def _show(judgement: Any) -> None:
    for row in judgement.rows:
        show_pairs({"size": row.name, **_row(row)})
        if len(row.joint_rates):
            show_table(("token", "kept with all before", "kept if reached"), _positions(row))
        if row.categories:
            show_table(("category", "prompts", "acceptance length"), [_category(c) for c in row.categories])
        show_lines([""])
    for baseline in judgement.baselines:
        per_step = f"{_number(baseline.tokens_per_step)} tokens per step"
        show_pairs({baseline.name: f"{per_step}, acceptance length {_estimate(baseline.length)} where it guesses"})
    for found in judgement.divergences:
        show_lines(wrapped(_divergence(found)))
    for note in judgement.notes:
        show_lines(wrapped(note))
    show_lines(wrapped(judgement.sentence))


def _row(row: Any) -> dict[str, str]:
    pairs = {
        "prompts": f"{row.prompts:,}, {row.tokens:,} tokens in {row.steps:,} steps of the target",
        "acceptance length": _estimate(row.length),
        "mean over prompts": _number(row.macro_mean),
        "tokens per step": _number(row.tokens_per_step),
    }
    if row.difference is not None and row.difference.relative is not None:
        found = row.difference
        low, high = found.relative_low, found.relative_high
        interval = f" (95 %: {low:+.1%} to {high:+.1%})" if low is not None and high is not None else ""
        pairs["difference"] = f"{found.relative:+.2%} against {row.against}{interval}"
    if row.tokens_per_second is not None:
        pairs["tokens/s"] = f"{row.tokens_per_second:,.1f}"
    if row.speed_up is not None:
        pairs["speed-up"] = f"{row.speed_up:.2f} x plain decoding ({row.plain_tokens_per_second:,.1f} tokens/s)"
    if row.bytes_per_token:
        pairs["between stages"] = f"{human_bytes(round(row.bytes_per_token))} a token"
    return pairs


def _positions(row: Any) -> list[tuple[str, str, str]]:
    rates = zip(row.joint_rates, row.conditional_rates, strict=True)
    return [(str(i + 1), _share(joint), _share(conditional)) for i, (joint, conditional) in enumerate(rates)]


def _category(row: Any) -> tuple[str, str, str]:
    return row.name, str(row.length.prompts), _estimate(row.length)


def _divergence(found: Any) -> str:
    # A server tells none. The larger one decides.
    known = [gap for gap in (found.gap, found.other_gap) if gap is not None]
    gap = f", the two best logits {max(known):.2g} apart" if known else ""
    why = {True: "; rounding can do that", False: "; too far apart for rounding", None: ""}[found.is_near]
    token, other = ("ended" if token is None else token for token in (found.token, found.other_token))
    turn = f", turn {found.turn + 1}" if found.turn else ""
    return (
        f"{found.size} leaves {found.against} at token {found.index + 1} of prompt {found.id}{turn}: "
        f"{token} for {other}{gap}{why}"
    )


def _estimate(found: Any) -> str:
    if found.value is None:
        return "-"
    if found.low is None:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} (95 %: {found.low:.3f} to {found.high:.3f})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

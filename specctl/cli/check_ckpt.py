"""`specctl check-ckpt`: signature -> config -> recipe -> output."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from specctl.cli import options
from specctl.cli.output import human_bytes, is_terminal, show_json, show_lines, show_pairs, show_table, wrapped
from specctl.cli.reporter import StderrReporter
from specctl.errors import EXIT_NO, EXIT_YES, UsageError

EXAMPLES = (
    "specctl check-ckpt ./draft --target ./SmolLM2",
    "specctl check-ckpt ./draft --runtime sglang --runtime-version 0.5.10",
    "specctl check-ckpt --explain D2T_MISSING",
)
INDENT = "         "


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(name="check-ckpt", epilog=options.epilog(EXAMPLES), no_args_is_help=True)(check_ckpt)


def check_ckpt(
    draft: Annotated[
        str | None,
        typer.Argument(metavar="DRAFT", help="Draft's folder (config.json and weights), or a hub id (owner/name)."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The model it drafts for: folder or hub id. More can be checked with it.")
    ] = None,
    runtime: Annotated[str, typer.Option(help="Server to judge for: vllm or sglang.")] = "vllm",
    runtime_version: Annotated[
        str | None, typer.Option(help="Its version, as 0.30.0; the newest one known unless given.")
    ] = None,
    pp: Annotated[int, typer.Option(help="Pipeline stages that the target will be served in.")] = 1,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read all tensors too: NaN, empty rows, the embedding beside the target's.")
    ] = False,
    fix: Annotated[
        str | None, typer.Option(metavar="OUT", help="Write a copy with every finding repaired that has one repair.")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Layout of the checkpoint, if it is recognised wrongly.")
    ] = None,
    rules: Annotated[bool, typer.Option("--rules", help="List every rule and exit.")] = False,
    explain: Annotated[str | None, typer.Option(metavar="ID", help="Tell the story of one rule and exit.")] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Say whether a draft will load, and work, in a server before you serve it.

    Exit code 0: it will. 1: it will not, and why. 2: there was nothing to check.
    """
    # Sums of small tables need no second thread, and starting them costs more than the whole check.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from specctl.recipes import check as recipe
    from specctl.records.check import CheckConfig

    if rules:
        _show_rules(recipe.rules(), json)
        return EXIT_YES
    if explain is not None:
        _show_story(recipe.explain(explain), json)
        return EXIT_YES
    if not draft:
        raise UsageError("DRAFT is missing", hint="`specctl check-ckpt --help` shows what there is")
    config = CheckConfig(draft, target, runtime, runtime_version, pp, deep, fix, from_)
    reporter = StderrReporter(is_quiet=quiet)
    if fix is None:
        report = recipe.check(config, reporter)
    else:
        from specctl.recipes.repair import check_and_fix

        report = check_and_fix(config, reporter)
        if report.fixed is None:
            reporter.note(f"nothing to repair, so nothing was written to {fix}")
    passes = report.fixed.check.passes if report.fixed is not None else report.passes
    if json:
        show_json("check-ckpt", passes, report)
    else:
        _show(report)
    return EXIT_YES if passes else EXIT_NO


def _show(report: Any) -> None:
    _show_check(report)
    if report.fixed is None:
        _show_verdict(report)
        return
    fixed = report.fixed
    show_lines([f"repaired {', '.join(fixed.repaired)} in the copy {fixed.out}:"])
    show_lines([line for change in fixed.changes for line in wrapped(change, "  ")])
    show_lines(["", "the copy:"])
    _show_check(fixed.check)
    _show_verdict(fixed.check)


def _show_check(report: Any) -> None:
    kind = "P-EAGLE" if report.is_parallel else "EAGLE-3"
    is_head = all(finding.rule != "KIND_OTHER" for finding in report.findings)
    show_pairs(
        {
            "draft": f"{kind} in the {report.layout} layout, {report.container}" if is_head else "none that is known",
            "size": f"{report.tensors} tensors, {human_bytes(report.bytes)}",
            "reads": _boundaries(report),
            "embedding": report.embedding,
        }
    )
    if is_terminal():
        show_lines([""])
    for finding in report.findings:
        if not is_terminal():
            parts = (finding.level, finding.rule, finding.where, finding.expected, finding.found, finding.fix)
            show_lines(["\t".join(part.replace("\t", " ").replace("\n", " ") for part in parts)])
            continue
        show_lines([f"{finding.level.ljust(8)} {finding.rule}: {finding.says}"])
        for line in (f"in {finding.where}", f"expected {finding.expected}", f"found    {finding.found}"):
            show_lines(wrapped(line, INDENT))
        show_lines([*wrapped(f"fix: {finding.fix}", INDENT), ""])


def _boundaries(report: Any) -> str:
    if report.aux_ids == ():
        return "no layer but the target's last state"
    if report.aux_ids is None:
        return f"boundaries 2, N/2 and N-3 of the target's N layers ({report.runtime}'s default)"
    ids = ", ".join(map(str, report.aux_ids))
    meant = report.declared_aux_ids
    differs = meant is not None and tuple(sorted(meant)) != tuple(report.aux_ids)
    return f"boundaries {ids}" + (f"; the checkpoint means {', '.join(map(str, meant))}" if differs else "")


def _show_verdict(report: Any) -> None:
    server = f"{report.runtime} {report.runtime_version}" + (f" in {report.pp} stages" if report.pp > 1 else "")
    tally = ", ".join(
        f"{number} {word}{'s' if number != 1 else ''}"
        for number, word in ((report.errors, "error"), (report.warnings, "warning"), (report.notes, "note"))
        if number
    )
    if report.passes and report.target is None:
        show_lines(wrapped("not checked without --target: vocabulary, width, layers, rope, end of text, embedding"))
    if report.passes:
        show_lines([f"serve\t{report.serve}"] if not is_terminal() else ["serve it with:", f"  {report.serve}", ""])
    else:
        for step in report.instead:
            show_lines(wrapped(f"instead: {step}", "") if is_terminal() else [f"instead\t{step}"])
    verdict = "PASS: this draft loads and works in" if report.passes else "FAIL: this draft does not work in"
    if any(finding.rule == "LINK_OUTSIDE" for finding in report.findings):
        verdict = "FAIL: not all of this draft was read, so nothing is known of it in"
    show_lines([f"{verdict} {server}" + (f" ({tally})" if tally else "")])


def _show_rules(rules: Any, as_json: bool) -> None:
    fields = ("id", "level", "says", "needs", "since", "source")
    if as_json:
        show_json("check-ckpt", True, {"rules": [{name: getattr(r, name) for name in fields} for r in rules]})
        return
    show_table(("rule", "level", "says"), [(r.id, r.level, r.says) for r in rules])


def _show_story(rule: Any, as_json: bool) -> None:
    fields = ("id", "level", "says", "story", "fix", "needs", "since", "source")
    if as_json:
        show_json("check-ckpt", True, {name: getattr(rule, name) for name in fields})
        return
    lines = [f"{rule.id} ({rule.level}): {rule.says}", "", *wrapped(rule.story), "", *wrapped(f"Fix: {rule.fix}.")]
    if rule.since:
        lines += ["", *wrapped(f"Holds for: {rule.since}.")]
    if rule.needs:
        lines += ["", *wrapped(f"Checked with: {', '.join(NEEDS[need] for need in rule.needs)}.")]
    show_lines([*lines, "", *wrapped(f"Source: {rule.source}")])


NEEDS = {
    "target": "--target",
    "deep": "--deep",
    "vllm": "--runtime vllm",
    "sglang": "--runtime sglang",
    "pp": "--pp above 1",
}

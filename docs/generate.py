"""Writes docs/cli.md from the program's own help and docs/rules.md from the rules; with --check only compares.

The program is the one source: a flag that is renamed cannot stay in the docs.
"""

import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from specctl.cli.check_ckpt import NEEDS  # noqa: E402


def cli_page() -> str:
    """The help of every command, as Markdown."""
    import typer.main

    from specctl.cli.app import COMMANDS, app

    root = typer.main.get_command(app)
    parts = ["# Commands\n\nWritten by `make docs` from the program's own help.\n"]
    for name in COMMANDS:
        command = root.get_command(None, name)
        context = command.make_context(f"specctl {name}", ["x"], resilient_parsing=True)
        parts.append(f"## specctl {name}\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(parts)


def rules_page() -> str:
    """Every rule of `specctl check-ckpt`, by the part of the checkpoint it looks at."""
    from specctl import plugins

    parts = [
        "# Rules of `specctl check-ckpt`\n\nWritten by `make docs` from the rules themselves. An *error* will not load "
        "or is provably wrong; a *warning* loads and loses acceptance, or depends on the version; a *note* is worth "
        "knowing.\n"
    ]
    for name in plugins.names("contracts"):
        contract = plugins.load("contracts", name)
        parts.append(f"## {name}\n\n{contract.__doc__.strip()}\n")
        parts += [_rule_text(rule) for rule in contract.RULES]
    return "\n".join(parts)


def _rule_text(rule: Any) -> str:
    lines = [f"### {rule.id}\n", f"*{rule.level}*: {rule.says}.\n", f"{rule.story}\n", f"**Fix:** {rule.fix}.\n"]
    if rule.since:
        lines.append(f"**Holds for:** {rule.since}.\n")
    if rule.needs:
        lines.append(f"**Checked with:** {', '.join(NEEDS[need] for need in rule.needs)}.\n")
    return "\n".join([*lines, f"**Source:** {rule.source}.\n"])


def settings_page() -> str:
    """Every setting of the commands that take `--config`, with its default."""
    from dataclasses import MISSING, fields

    from specctl.records.evaluation import EvalConfig
    from specctl.records.extraction import ExtractConfig
    from specctl.records.regeneration import RegenerateConfig
    from specctl.records.settings import BEYOND_FLAGS
    from specctl.records.training import TrainConfig

    kinds = {"regenerate": RegenerateConfig, "extract": ExtractConfig, "train": TrainConfig, "eval": EvalConfig}
    parts = [
        "# Settings\n\nWritten by `make docs`. `--config run.toml` takes every setting of a command, by the name of "
        "its flag with `_` or `-`; flags win over the file. What a flag means, [cli.md](cli.md) says; the settings "
        "below have none.\n"
    ]
    for command, kind in kinds.items():
        meanings = BEYOND_FLAGS[command]
        defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
        flags = ", ".join(f"`{f.name}`" for f in fields(kind) if f.name not in meanings)
        rows = [f"| `{name}` | {_toml(defaults[name])} | {meaning} |" for name, meaning in meanings.items()]
        table = "\n".join(["| setting | default | what it is |", "|---|---|---|", *rows])
        parts.append(f"## specctl {command}\n\n{table}\n\nWith a flag or an argument: {flags}.\n")
    return "\n".join(parts)


def _toml(value: Any) -> str:
    if value is None or value == ():
        return "not set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


PAGES = {"cli.md": cli_page, "rules.md": rules_page, "settings.md": settings_page}


def main(arguments: list[str]) -> int:
    """Write, or compare and say what to do."""
    os.environ["COLUMNS"] = "80"
    stale = 0
    for name, make in PAGES.items():
        path, page = ROOT / "docs" / name, make()
        if arguments != ["--check"]:
            path.write_text(page)
        elif not path.exists() or path.read_text() != page:
            sys.stderr.write(f"error: docs/{name} differs from the program\n\nhint: make docs\n")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Writes docs/cli.md from the program's own help; with --check only compares.

The help is the one source: a flag that is renamed cannot stay in the docs.
"""

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def cli_page() -> str:
    """The help of every command, as Markdown."""
    import typer.main

    from specctl.cli.app import COMMANDS, app

    root = typer.main.get_command(app)
    parts = ["# Commands\n\nWritten by `make docs` from the program's own help.\n"]
    for name in COMMANDS:
        importlib.import_module(f"specctl.cli.{name}")
        command = root.get_command(None, name)
        context = command.make_context(f"specctl {name}", ["x"], resilient_parsing=True)
        parts.append(f"## specctl {name}\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write, or compare and say what to do."""
    os.environ["COLUMNS"] = "80"
    path = ROOT / "docs" / "cli.md"
    page = cli_page()
    if arguments == ["--check"]:
        if not path.exists() or path.read_text() != page:
            sys.stderr.write("error: docs/cli.md differs from the program's help\n\nhint: make docs\n")
            return 1
        return 0
    path.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

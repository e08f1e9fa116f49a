"""The program: commands, and what becomes of what they raise. Imports nothing heavy."""

import importlib
import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any

import typer

from specctl import __version__
from specctl.cli.output import ReaderLeft, finish_streams, say, show_bug, show_error, show_lines, take_streams
from specctl.errors import EXIT_COULD_NOT, EXIT_INTERRUPTED, EXIT_YES, InterruptedRun, SpecctlError

COMMANDS = ("extract", "regenerate", "inspect", "train", "check-ckpt", "convert", "eval")

KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KERNELS_KEPT = "16"
"""On a CPU torch keeps the last 1024 kernels, each made for one shape and 0.5 MiB large. Every batch
here has a new shape: what one forward needs is enough, and the rest would grow to 450 MiB."""

app = typer.Typer(
    name="specctl",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Make, check and measure drafts for speculative decoding of large language models.\n\n"
    "A draft is a small model that guesses the next tokens of a large one, the target. It learns from "
    "the target's hidden states, which `specctl extract` writes to disk.",
)


def _show_version(value: bool) -> None:
    if value:
        show_lines([f"specctl {__version__}"])
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _name in COMMANDS:
    importlib.import_module(f"specctl.cli.{_name.replace('-', '_')}").register(app)


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with the code that `errors` assigns."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        take_streams()
    except SpecctlError as error:
        show_error(error)
        sys.exit(error.exit_code)
    sys.exit(finish_streams(run(args)))


def run(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, KERNELS_KEPT)
    try:
        result: Any = app(args=args, prog_name="specctl", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        return _usage(error)
    except SpecctlError as error:
        show_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        show_error(InterruptedRun("interrupted"))
        return EXIT_INTERRUPTED
    except ReaderLeft:
        return EXIT_YES  # no more output, and not an error
    except Exception as error:
        return show_bug(error)


def _usage(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "specctl"
    message = error.format_message().strip().rstrip(".")
    if message.startswith("Usage:"):  # called without arguments: the message is the help
        say(message)
        return EXIT_COULD_NOT
    show_error(SpecctlError(message[:1].lower() + message[1:], hint=f"`{command} --help` shows what there is"))
    return EXIT_COULD_NOT


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt

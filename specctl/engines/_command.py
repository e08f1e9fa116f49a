"""Commands that start servers: what the user gave, which program and Python it is, what of it may be shown."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

from specctl.errors import MachineError, UsageError

PROBE_TIMEOUT_S: Final = 300.0
IS_VERSION: Final = re.compile(r"v?\d+\.\d+")
PACKAGE: Final = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass"
)

CONTAINERS: Final = ("docker", "podman", "nerdctl")
IS_PYTHON: Final = re.compile(r"python[\d.]*")
IS_SECRET: Final = re.compile(r"--(?:.+-)?(?:key|token|secret|password)", re.IGNORECASE)
SECRET_NAME: Final = re.compile(r"(\w*(?:KEY|TOKEN|SECRET|PASSWORD)\w*=).+", re.DOTALL)
MASK: Final = "***"


def words(text: str | None, option: str) -> list[str]:
    """A shell command or arguments as a list; nothing where nothing was said. Raises UsageError for open quotes."""
    if text is None:
        return []
    spelled = f"`--{option.replace('_', '-')}`"
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{spelled} cannot be split into words: {error}") from None
    if not found:
        raise UsageError(f"{spelled} is empty")
    return found


def value_of(args: Sequence[str], *options: str) -> str | None:
    """What the arguments give for an option in any of its spellings, the last where it is given twice.

    `-O` also stands for `-O3`, and `-cc` for `-cc.mode=0`.
    """
    found = None
    for at, word in enumerate(args):
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in options:
            found = value if equals else args[at + 1] if at + 1 < len(args) else ""
        elif any(name.startswith(f"{option}." if len(option) > 2 else option) for option in options):
            found = value if equals else name[2:]
    return found


def masked(command: Iterable[str]) -> list[str]:
    """The command as it may be shown: keys, tokens and passwords are not."""
    shown: list[str] = []
    is_secret = False
    for word in command:
        # `--api-key` takes several.
        is_secret = is_secret and not word.startswith("-")
        option, equals, _ = word.partition("=")
        if is_secret:
            shown.append(MASK)
        elif IS_SECRET.fullmatch(option.replace("_", "-")):
            shown.append(f"{option}={MASK}" if equals else word)
            is_secret = not equals
        else:
            shown.append(SECRET_NAME.sub(rf"\1{MASK}", word))
    return shown


def shown(command: Iterable[str]) -> str:
    """The command in one line, as `masked`."""
    return shlex.join(masked(command))


def venv_python(venv: str, title: str) -> Path:
    """The Python of `--server-venv`. Raises UsageError for a folder that is no virtual environment."""
    folder = Path(venv).expanduser().absolute()
    python = folder / "bin" / "python"
    if not folder.is_dir():
        raise no_package(title, f"there is no folder {folder}")
    if not python.exists():
        raise no_package(title, f"the folder holds no {title}: it is no virtual environment, there is no {python}")
    return python


def no_package(title: str, message: str) -> UsageError:
    """The error for a `--server-venv` that cannot start the server."""
    hint = f"name the folder that `python -m venv` made and {title} was installed into"
    return UsageError(message, where="`--server-venv`", hint=hint)


def find_program(name: str, title: str) -> Path:
    """The program on the PATH. Raises MachineError."""
    found = shutil.which(name)
    if found is None:
        raise MachineError(
            f"`--engine` asks for {title}, and there is no `{name}` on the PATH",
            hint="name its virtual environment with `--server-venv DIR`, its command with `--server-command`, or a "
            "running server with `--endpoint URL`",
        )
    return Path(found)


def check_command(command: Sequence[str]) -> None:
    """Raises UsageError for a `--server-command` whose program is not there, and for one that runs a container.

    A container is no child of ours, listens on its own 127.0.0.1, and sees none of the machine's folders.
    """
    for word in takewhile(lambda word: not word.startswith("-"), command):
        if Path(word).name in CONTAINERS:
            raise UsageError(
                f"`--server-command` starts a container with `{word}`, and specctl can neither reach nor end it",
                hint="start it yourself with its port published, and name it with `--endpoint http://localhost:PORT`",
            )
    if shutil.which(command[0]) is None:
        raise UsageError(f"`--server-command` begins with `{masked(command)[0]}`, and there is no such program")


def python_of(command: Sequence[str]) -> list[str] | None:
    """The part of a command that is its Python, before `-m MODULE`; None where it starts no module of Python.

    Other programs have a `-m` of their own, as `numactl` does.
    """
    python = max((at for at, word in enumerate(command) if IS_PYTHON.fullmatch(Path(word).name)), default=None)
    if python is None or "-m" not in command[python:]:
        return None
    module = command.index("-m", python)
    own = range(python + 1, module)
    is_its = all(command[at].startswith("-") or command[at - 1] in ("-X", "-W") for at in own)
    return list(command[:module]) if is_its else None


def output_of(command: Sequence[str]) -> str | None:
    """What a command prints, None where it fails."""
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None


def package_of(python: Sequence[str], *names: str) -> tuple[str, str] | None:
    """Which of these packages this Python has, and its version, without importing it; None where it has none."""
    found = (output_of([*python, "-c", PACKAGE, *names]) or "").split()
    return (found[0], found[1]) if len(found) == 2 and IS_VERSION.match(found[1]) else None


def python_beside(program: Path) -> Path | None:
    """The Python of the environment that a program is in. A link to it, as pipx makes them, has another beside it."""
    python = program.resolve().parent / "python"
    return python if python.exists() else None


def draft_folder(draft: str) -> str:
    """The draft as the server is to find it: the absolute folder, or the name as it stands for one of a hub."""
    path = Path(draft)
    return str((path.parent if path.is_file() else path).absolute()) if path.exists() else draft

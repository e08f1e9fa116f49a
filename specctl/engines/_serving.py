"""What the engines that are servers have in common: which command, which refusals, how a session with one goes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from specctl.engines._client import Client, NoAnswer, connect, get_text, is_up
from specctl.engines._process import Process, free_port, running, wait_until
from specctl.errors import MachineError, NotSupportedError, UsageError
from specctl.records.dialogue import Sampling
from specctl.records.evaluation import DecodePlan, EvalConfig, Prompt
from specctl.records.progress import Reporter
from specctl.records.target import TargetSpec

PROBE_TIMEOUT_S: Final = 300.0
DEATH_S: Final = 5.0
"""A server whose connections break is dying: so long until it is dead."""

START_OPTIONS: Final = ("server_command", "server_venv", "server_args")
WARM_UP: Final = (1, 2, 3, 4)
WARM_TOKENS: Final = 8
"""A short request that is not counted."""

IS_VERSION: Final = re.compile(r"v?\d+\.\d+")
PACKAGE: Final = (
    "import importlib.metadata as m, sys\n"
    "for name in sys.argv[1:]:\n"
    "    try: print(name, m.version(name)); break\n"
    "    except m.PackageNotFoundError: pass"
)


class ServerConfig(Protocol):
    """How a server is started, as in EvalConfig."""

    @property
    def tp(self) -> int: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def server_command(self) -> str | None: ...
    @property
    def server_venv(self) -> str | None: ...
    @property
    def server_args(self) -> str | None: ...
    @property
    def server_timeout(self) -> float: ...


class ServerPlan(Protocol):
    """What a server is to run, as in DecodePlan."""

    @property
    def config(self) -> ServerConfig: ...
    @property
    def spec(self) -> TargetSpec: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Server:
    """One that answers. `process` is None for one that was there before."""

    title: str
    client: Client
    process: Process | None


def refuse_options(config: EvalConfig, title: str) -> None:
    """Raises UsageError for a sampler that is none and for options that contradict each other."""
    from specctl.core.sampling import Sampler

    Sampler(config.temperature, config.top_p, config.top_k)
    if config.device != "auto":
        raise UsageError(
            f"`--device {config.device}`: {title} chooses its devices itself",
            hint="say it in `--server-args`, or in the environment as in CUDA_VISIBLE_DEVICES=0",
        )
    if config.server_timeout <= 0:
        raise UsageError(f"`server_timeout = {config.server_timeout:g}` is not above 0")
    for name in ("server_command", "server_args"):
        words(getattr(config, name), name)
    if config.server_command is not None and config.server_venv is not None:
        raise UsageError("`--server-command` and `--server-venv` both say what to start", hint="leave one of them out")
    if config.endpoint is not None:
        _refuse_with_endpoint(config)


def _refuse_with_endpoint(config: EvalConfig) -> None:
    connect(config.endpoint or "", timeout_s=1.0)
    for name in START_OPTIONS:
        if getattr(config, name) is not None:
            raise UsageError(
                f"`--{name.replace('_', '-')}` says how to start a server, and the one at `--endpoint` runs already",
                hint="leave one of the two out",
            )
    if len(config.pp) > 1:
        raise UsageError(
            f"`--pp` is given as {list(config.pp)}, and the server at `--endpoint` runs with one size",
            hint="name the size that it runs with",
        )
    if config.dtype != "auto":
        raise UsageError(f"`--dtype {config.dtype}`: the server at `--endpoint` decides that", hint="leave it out")


def words(text: str | None, option: str) -> list[str]:
    """A shell command or arguments as a list; nothing where nothing was said. Raises UsageError for open quotes."""
    if text is None:
        return []
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"`--{option.replace('_', '-')} {text}` cannot be split into words: {error}") from None
    if not found:
        raise UsageError(f"`--{option.replace('_', '-')}` is empty")
    return found


def find_program(config: ServerConfig, name: str, title: str) -> Path:
    """The program in the bin folder of `--server-venv`, else on the PATH. Raises UsageError, MachineError."""
    if config.server_venv is not None:
        path = Path(config.server_venv).expanduser() / "bin" / name
        if not path.is_file():
            raise UsageError(
                f"the virtual environment holds no {title}: there is no {path}",
                where="`--server-venv`",
                hint=f"name the folder that `python -m venv` made and {title} was installed into",
            )
        return path.absolute()
    found = shutil.which(name)
    if found is None:
        raise MachineError(
            f"`--engine` asks for {title}, and there is no `{name}` on the PATH",
            hint="name its virtual environment with `--server-venv DIR`, its command with `--server-command`, or a "
            "running server with `--endpoint URL`",
        )
    return Path(found)


def check_command(command: Sequence[str]) -> None:
    """Raises UsageError for a `--server-command` whose program is not there."""
    if shutil.which(command[0]) is None:
        raise UsageError(f"`--server-command` begins with `{command[0]}`, and there is no such program")


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


def seed_of(config: EvalConfig, prompt: Prompt) -> int:
    """31 bits of the run's seed and the prompt's key."""
    return Sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed).seed_of(prompt.key)


def value_of(args: Sequence[str], *options: str) -> str | None:
    """What the arguments give for an option in any of its spellings, the last where it is given twice."""
    found = None
    for at, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in options:
            found = value if equals else args[at + 1] if at + 1 < len(args) else ""
    return found


@contextmanager
def attached(plan: DecodePlan, title: str, health: str) -> Iterator[Server]:
    """The server at `--endpoint`. Raises MachineError where it is not there."""
    client = endpoint_client(plan)
    if get_text(client, health) is None:
        raise MachineError(
            f"there is no `{health}`: it is no {title}, or its root is another",
            where=client.url + health,
            hint="`--endpoint` names the root, as in `http://localhost:8000`",
        )
    yield Server(title, client, None)


def endpoint_client(plan: DecodePlan) -> Client:
    """Who asks the server at `--endpoint`."""
    assert plan.config.endpoint is not None
    return connect(plan.config.endpoint, timeout_s=plan.config.server_timeout, api_key=plan.api_key)


@contextmanager
def started(
    command: Sequence[str],
    plan: ServerPlan,
    title: str,
    health: str,
    reporter: Reporter,
    *,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server of our own that is ready, and gone at the end. Its command gets host and port added."""
    config = plan.config
    extra = words(config.server_args, "server_args")
    port = value_of(extra, "--port") or str(free_port())
    full = [*command, "--host", "127.0.0.1", "--port", port, *extra]
    reporter.note(f"starting {title}: {shlex.join(full)}")
    client = connect(f"http://127.0.0.1:{port}", timeout_s=config.server_timeout)
    with running(full, title, os.environ if environment is None else environment) as process:
        server = Server(title, client, process)
        wait_until(lambda: is_up(client, health), process, timeout_s=config.server_timeout, reporter=reporter)
        yield server


@contextmanager
def explained(server: Server) -> Iterator[None]:
    """Names the death of a server where it is the cause of what went wrong with its answers."""
    try:
        yield
    except NoAnswer as error:
        cause = _death(server)
        if cause is None:
            raise
        raise cause from error


def _death(server: Server) -> MachineError | None:
    until = time.monotonic() + DEATH_S
    while server.process is not None:
        cause = server.process.cause("it answered")
        if cause is not None or time.monotonic() > until:
            return cause
        time.sleep(0.05)
    return None


def take_draft_tokens(plan: DecodePlan, served: int) -> int:
    """How many tokens the server drafts, where that does not contradict what was asked.

    Raises UsageError where it does; 0 is a server that does not draft.
    """
    asked = plan.config.num_draft_tokens
    if plan.config.no_spec and served:
        raise UsageError("`--no-spec`, and the server drafts", hint="start it without its speculative settings")
    if not plan.config.no_spec and not served:
        raise NotSupportedError("the server does not draft: there is nothing to measure", hint="`--no-spec`")
    if asked is not None and not plan.config.no_spec and asked != served:
        raise UsageError(f"`--num-draft-tokens {asked}`, and the server drafts {served}", hint="leave it out")
    return served

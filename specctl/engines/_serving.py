"""What the engines that are servers have in common: which command, which refusals, how a session with one goes."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from specctl.engines._client import Client, NoAnswer, connect, get_text, is_up
from specctl.engines._command import shown, value_of, words
from specctl.engines._process import Process, free_port, running, wait_until
from specctl.errors import MachineError, NotSupportedError, UsageError
from specctl.records.dialogue import Sampling
from specctl.records.evaluation import SHORTER, DecodePlan, EvalConfig, Prompt, too_long
from specctl.records.progress import Reporter
from specctl.records.target import TargetSpec

DEATH_S: Final = 5.0
"""A server whose connections break is dying: so long until it is dead."""

START_OPTIONS: Final = ("server_command", "server_venv", "server_args")
SGLANG_INFO: Final = ("/server_info", "/get_server_info")
"""Where SGLang speaks of itself: its newer name for it first."""

WARM_UP: Final = (1, 2, 3, 4)
WARM_TOKENS: Final = 8
"""A short request that is not counted."""

REQUEST_S: Final = 3600.0
"""The longest that one answer may take."""

KEY_OF_STARTED: Final = "`--api-key` in `--server-args`, or the environment variable VLLM_API_KEY"


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
    _refuse_timeout(config)
    for name in ("server_command", "server_args"):
        words(getattr(config, name), name)
    if config.server_command is not None and config.server_venv is not None:
        raise UsageError("`--server-command` and `--server-venv` both say what to start", hint="leave one of them out")
    if config.endpoint is not None:
        _refuse_with_endpoint(config)


def _refuse_timeout(config: ServerConfig) -> None:
    if not (math.isfinite(config.server_timeout) and config.server_timeout > 0):
        raise UsageError(f"`server_timeout = {config.server_timeout:g}` is not above 0 and finite")


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


def seed_of(config: EvalConfig, prompt: Prompt) -> int:
    """31 bits of the run's seed and the prompt's key."""
    return Sampling(config.max_new_tokens, config.temperature, config.top_p, config.seed).seed_of(prompt.key)


@contextmanager
def attached(plan: DecodePlan, title: str, health: str) -> Iterator[Server]:
    """The server at `--endpoint`. Raises MachineError where it is not there."""
    client = endpoint_client(plan)
    if get_text(client, health) is None:
        raise other_kind(client, health, title, None)
    yield Server(title, client, None)


def other_kind(client: Client, path: str, title: str, engine: str | None) -> MachineError:
    """The error for a server without `path`; `engine` is what it answers as, where that is known."""
    root = "`--endpoint` names the root, as in `http://localhost:8000`"
    return MachineError(
        f"there is no `{path}`: it is no {title}, or its root is another",
        where=client.url + path,
        hint=root if engine is None else f"it answers as {engine} does: `--engine {engine}`",
    )


def endpoint_client(plan: DecodePlan) -> Client:
    """Who asks the server at `--endpoint`."""
    assert plan.config.endpoint is not None
    return connect(plan.config.endpoint, timeout_s=REQUEST_S, api_key=plan.api_key)


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
    """A server of our own that is ready, and gone at the end. Its command gets host and port added.

    Raises UsageError for a port that is none or that something listens on.
    """
    config = plan.config
    _refuse_timeout(config)
    given = os.environ if environment is None else environment
    extra = words(config.server_args, "server_args")
    port = _port(extra)
    full = [*command, "--host", "127.0.0.1", "--port", str(port), *extra]
    reporter.note(f"starting {title}: {shown(full)}")
    key = value_of(full, "--api-key") or given.get("VLLM_API_KEY") or None
    client = connect(f"http://127.0.0.1:{port}", timeout_s=REQUEST_S, api_key=key, key_from=KEY_OF_STARTED)
    with running(full, title, given) as process:
        server = Server(title, client, process)
        wait_until(lambda: is_up(client, health), process, timeout_s=config.server_timeout, reporter=reporter)
        yield server


def _port(args: Sequence[str]) -> int:
    """The port that the user names, else a free one."""
    said = value_of(args, "--port")
    if said is None:
        return free_port()
    if not (said.isascii() and said.isdigit() and 0 < int(said) < 65536):
        raise UsageError(f"`--port {said}` in `--server-args` is no port", hint="leave it out: a free one is taken")
    with socket.socket() as asking:
        asking.settimeout(5.0)
        if asking.connect_ex(("127.0.0.1", int(said))) == 0:
            raise UsageError(
                f"something listens on `--port {said}` already, and would be measured instead",
                where="`--server-args`",
                hint="leave the port out, or measure what listens there with `--endpoint`",
            )
    return int(said)


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


def note_labels(config: EvalConfig, reporter: Reporter) -> None:
    """Says that the sizes of a server at `--endpoint` are the user's word."""
    given = [f"`--pp {pp}`" for pp in config.pp if pp != 1] + ([f"`--tp {config.tp}`"] if config.tp != 1 else [])
    if given:
        reporter.note(f"{' and '.join(given)} only label the result: the server at `--endpoint` is not asked its sizes")


def is_target(plan: DecodePlan, *names: str) -> bool:
    """Whether one of these names or paths is the target's, in full or by its last part."""
    known = (plan.config.target, plan.spec.path, plan.spec.name)
    return bool({last for name in known for last in (name, _last(name))} & {_last(name) for name in names if name})


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def refuse_long(prompts: Sequence[Prompt], plan: DecodePlan, room: int | None, server: Server) -> None:
    """Raises MachineError where texts of `room` tokens have no place for some prompt, its answer and its drafts."""
    found = too_long(prompts, plan, room)
    if found is not None:
        # One that was started is gone when this is read.
        raise MachineError(found, where=server.client.url if server.process is None else None, hint=SHORTER)

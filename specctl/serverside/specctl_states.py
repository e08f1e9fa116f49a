"""Runs inside vLLM, not inside specctl: hands out hidden states where there is no GPU.

vLLM's own connector copies through pinned memory on a CUDA stream. This one is the same on the scheduler's side
and in the files it writes; a worker copies the states plainly. vLLM loads it by `kv_connector_module_path`.
Source: vLLM 0.32.0, distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Copied:
    """Stands where a CUDA event would: the copy is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class HostStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]
    """States of finished requests, from host memory to files."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        tokens = pending.token_ids
        blocks = tokens.new_tensor(pending.block_ids)[:, None] * self._block_size
        rows = (blocks + tokens.new_tensor(range(self._block_size))).flatten()
        # The cache is written again as soon as the request's blocks are free.
        states = extract_from_kv_cache(self._kv_cache, rows, len(tokens)).clone().contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": states, "token_ids": tokens.clone()}
        future = self._executor.submit(self._write_tensors, tensors, Copied(), pending.filename, lock)
        self._req_copy_events[pending.req_id] = Copied()
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

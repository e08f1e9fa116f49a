"""A process that acts as a vLLM that hands out hidden states: `--server-command "python tests/statesserver.py serve"`.

The environment variable FAKE names what it does wrong: "short", "tokens", "layers", "nowhere", "outside", "dtype".
"""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serverparts import Reply, as_json, serving

from specctl.files.safetensors import write
from specctl.files.tensors import Table

WIDTH = 32


def states_of(token_ids: Sequence[int], layers: Sequence[int]) -> np.ndarray:
    """float32 [T, layers, WIDTH]: what a token has at a layer, whatever stands around it."""
    tokens = np.asarray(token_ids, np.float32)[:, None, None]
    numbers = np.asarray(layers, np.float32)[None, :, None]
    return np.sin(tokens + 1) * (numbers + 1) + np.arange(WIDTH, dtype=np.float32) / WIDTH


def bits(states: np.ndarray, dtype: str) -> np.ndarray:
    """As a file of this dtype holds them; bfloat16 by cutting, which is as good as rounding for telling them apart."""
    return (states.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else states.astype(dtype)


class States:
    """Writes a file for each request, as the connector does: named at once, written a moment later under a lock."""

    key = None

    def __init__(self, folder: Path, layers: Sequence[int], wrong: str, dtype: str) -> None:
        self.folder, self.layers, self.wrong, self.dtype = folder, layers, wrong, dtype
        self.count, self.lock = 0, threading.Lock()

    def get(self, path: str) -> Reply:
        return (200, b"") if path == "/health" else as_json({}, 404)

    def post(self, _path: str, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.count += 1
            path = self.folder / f"cmpl-{self.count}-0.safetensors"
        if self.wrong == "outside":
            path = self.folder.parent / path.name
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=(path, lock, body["prompt"])).start()
        told = {} if self.wrong == "nowhere" else {"hidden_states_path": str(path)}
        return as_json({"choices": [{"token_ids": [1]}], "kv_transfer_params": told})

    def write(self, path: Path, lock: int, ids: list[int]) -> None:
        time.sleep(0.02)
        layers = self.layers[:-1] if self.wrong == "layers" else self.layers
        found, tokens = states_of(ids, layers), np.asarray(ids, np.int64)
        if self.wrong == "short":
            found, tokens = found[1:], tokens[1:]
        if self.wrong == "tokens":
            tokens = tokens[::-1].copy()
        dtype = "float16" if self.wrong == "dtype" else self.dtype
        stored = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
        arrays = {"hidden_states": bits(np.ascontiguousarray(found), dtype), "token_ids": tokens}
        tables = {
            name: Table(stored if name == "hidden_states" else "I64", array.shape, array.tobytes())
            for name, array in arrays.items()
        }
        write(path, tables, {})
        os.close(lock)


def main(args: Sequence[str]) -> int:
    """`--version`, or serve until ended."""
    if args == ["--version"]:
        print(os.environ.get("FAKE_VERSION", "0.32.0"))
        return 0
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    speculation = json.loads(args[args.index("--speculative-config") + 1])
    assert speculation["method"] == "extract_hidden_states" and "--no-enable-prefix-caching" in args
    folder = Path(transfer["kv_connector_extra_config"]["shared_storage_path"])
    layers = speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    dtype = args[args.index("--dtype") + 1]
    server: Any = States(folder, sorted(layers), os.environ.get("FAKE", ""), dtype)
    with serving(server, int(args[args.index("--port") + 1])):
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

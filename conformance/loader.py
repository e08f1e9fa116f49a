"""Gives drafts to the real vLLM, one after the other. Runs in vLLM's own Python and knows nothing of specctl.

    python loader.py TARGET CASES.json > RESULTS.jsonl

A case is {"name", "draft" (null: none), "parallel"}. Each runs in a child forked after the import, so that one
that ends the process ends no other. A result is {"name", "tokens", "drafts", "accepted"} or {"name", "error"}.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
)

PROMPT = [1, 5, 9, 13, 20, 21]
NEW_TOKENS = 24
DRAFT_TOKENS = 3
PATIENCE_S = 120.0


def run(target: str, case: dict[str, Any]) -> dict[str, Any]:
    """Serve one greedy text with the draft of a case."""
    from vllm import LLM, SamplingParams

    speculation = None
    if case["draft"] is not None:
        speculation = {"method": "eagle3", "model": case["draft"], "num_speculative_tokens": DRAFT_TOKENS}
        if case["parallel"]:
            speculation["parallel_drafting"] = True
    model = LLM(
        target,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 27,
        max_model_len=256,
        max_num_seqs=4,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        dtype="float32",
        speculative_config=speculation,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    answer = model.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)[0].outputs[0]
    counters = {m.name.rpartition(":")[2]: getattr(m, "value", None) for m in model.get_metrics()}
    return {
        "tokens": list(answer.token_ids),
        "drafts": counters.get("spec_decode_num_drafts", 0),
        "accepted": counters.get("spec_decode_num_accepted_tokens", 0),
    }


def told(error: BaseException) -> str:
    """The error in one line, with the file of vLLM that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/vllm/" in frame.filename]
    place = f" ({frames[-1].filename.rpartition('/vllm/')[2]}:{frames[-1].lineno})" if frames else ""
    # A validation error tells the cause in its second line.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = next((line for line in lines if line.startswith("Value error, ")), lines[0] if lines else "")
    return f"{type(error).__name__}: {text.removeprefix('Value error, ')}{place}"


def in_child(target: str, case: dict[str, Any]) -> dict[str, Any]:
    """The result of a case, run in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        try:
            found = run(target, case)
        except BaseException as error:
            found = {"error": told(error)}
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], PATIENCE_S)
    text = b""
    while ready and (more := os.read(reading, 1 << 16)):
        text += more
    os.close(reading)
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)  # type: ignore[no-any-return]
    if not ready:
        return {"error": f"nothing within {PATIENCE_S:.0f} s"}
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"code {os.WEXITSTATUS(status)}"
    return {"error": f"the process ended with {name}"}


def main(target: str, cases: str) -> None:
    """Run every case; a line for each result."""
    import vllm  # noqa: F401  # imported once, before the forks

    for case in json.loads(Path(cases).read_text()):
        print(json.dumps({"name": case["name"], **in_child(target, case)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

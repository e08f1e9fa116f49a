"""Servers for tests of the engines: real HTTP, recorded answers (fixtures/metrics), and a process that acts as one.

`python tests/serverparts.py serve MODEL --port N` is what `--server-command` starts. The environment variable FAKE
says how it behaves: see `main`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent.parent / "fixtures" / "metrics"
FIRST_PROMPT = 100
"""The first id of a prompt says which recorded answer it gets: 100, 101 or 102."""

Reply = tuple[int, bytes]


def recorded(name: str) -> str:
    return (RECORDED / f"vllm-0.32-{name}").read_text()


def recorded_json(name: str) -> Any:
    return json.loads(recorded(f"{name}.json"))


def as_json(body: Any, status: int = 200) -> Reply:
    return status, json.dumps(body).encode()


def cut(answer: dict[str, Any], length: int) -> dict[str, Any]:
    """A recorded answer with at most `length` tokens, its steps cut as a server stops them."""
    answer = json.loads(json.dumps(answer))
    choice, spec = answer["choices"][0], answer["metrics"]["speculative_decoding"]
    choice["token_ids"] = choice["token_ids"][:length]
    kept, gained = [], 1
    for accepted in spec["per_step_accepted"]:
        if gained < len(choice["token_ids"]):
            kept.append(accepted)
            gained += accepted + 1
    most = spec["num_spec_tokens"]
    spec |= {"per_step_accepted": kept, "per_step_drafted": [most] * len(kept), "num_spec_steps": len(kept)}
    spec |= {"num_accepted_draft_tokens": sum(kept), "num_draft_tokens": most * len(kept)}
    spec["acceptance_histogram"] = [kept.count(i) for i in range(most + 1)]
    if not kept:  # vLLM then leaves them out
        spec["per_step_accepted"] = spec["per_step_drafted"] = None
    return answer


@dataclass
class Vllm:
    """What a vLLM server tells and what happens to it. `change` makes another answer of the n-th recorded one."""

    tells_requests: bool = True
    has_counters: bool = True
    has_ids: bool = True
    drafts: bool = True
    restarts_after: int | None = None
    others: int = 0
    """Drafts of other users that are verified with each prompt."""
    strangers: int = 0
    """Tokens that other users get with each prompt, without drafts and in requests that go on."""
    has_stats: bool = True
    broken_metrics_after: int | None = None
    busy_replies: list[Reply] = field(default_factory=list)
    """What the first requests get instead of an answer."""
    tokenized: Any = None
    """What /tokenize tells; nothing is there without it."""
    change: Callable[[int, dict[str, Any]], Reply | None] | None = None
    refuses: Reply | None = None
    models: Any = None
    key: str | None = None
    dies_after: int | None = None

    bodies: list[dict[str, Any]] = field(default_factory=list)
    busy: int = 0
    busiest: int = 0
    restarts: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> Reply:
        if path == "/health":
            return 200, b""
        if path == "/version":
            return 200, recorded("version.json").encode()
        if path == "/v1/models":
            return as_json(self.models) if self.models is not None else (200, recorded("models.json").encode())
        if path == "/metrics" and not self.has_stats:
            return 200, b"process_start_time_seconds 5.0\n"
        if self.broken_metrics_after is not None and len(self.bodies) > self.broken_metrics_after:
            return 200, b"<html>"
        if path == "/metrics" and self.has_counters:
            return 200, self.metrics().encode()
        return as_json({"detail": "Not Found"}, 404)

    def metrics(self) -> str:
        """The recorded scrape before any request, with what was counted since."""
        lines = []
        for line in recorded("metrics-before.txt").splitlines():
            name, _, value = line.rpartition(" ")
            if not self.drafts and "spec_decode" in line:
                continue
            if name == "process_start_time_seconds":
                value = str(float(value) + self.restarts)
            elif not line.startswith("#") and "_created" not in line:
                value = str(float(value) + self.counts.get(re.sub(r'engine="0",|,?model_name="smol"', "", name), 0))
            lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/tokenize":
            return as_json({"detail": "Not Found"}, 404) if self.tokenized is None else as_json(self.tokenized)
        with self.lock:
            if self.busy_replies:
                return self.busy_replies.pop()
            self.bodies.append(body)
            number = len(self.bodies) - 1
            self.busy += 1
            self.busiest = max(self.busiest, self.busy)
        try:
            return self._answer(number, body)
        finally:
            with self.lock:
                self.busy -= 1

    def _answer(self, number: int, body: dict[str, Any]) -> Reply:
        if self.refuses is not None:
            return self.refuses
        if self.dies_after is not None and number > self.dies_after:
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(9)
        completions = recorded_json("completions")
        index = body["prompt"][0] - FIRST_PROMPT
        answer = cut(completions[index if 0 <= index < len(completions) else 1], body["max_tokens"])
        self._count(answer)
        if number == self.restarts_after:
            self.counts.clear()
            self.restarts += 1
        if not self.tells_requests or not self.drafts:
            answer["metrics"] = None
        if not self.has_ids:
            ids = answer["choices"][0].pop("token_ids")
            if body.get("return_tokens_as_token_ids"):
                answer["choices"][0]["logprobs"] = {"tokens": [f"token_id:{i}" for i in ids]}
        changed = self.change(number, answer) if self.change is not None else None
        return as_json(answer) if changed is None else changed

    def _count(self, answer: dict[str, Any]) -> None:
        spec = answer["metrics"]["speculative_decoding"]
        reason, name = answer["choices"][0]["finish_reason"], "vllm:spec_decode_num"
        accepted = spec["per_step_accepted"] or []
        rises = {
            f"{name}_drafts_total{{}}": spec["num_spec_steps"] + self.others,
            f"{name}_draft_tokens_total{{}}": spec["num_draft_tokens"] + self.others * spec["num_spec_tokens"],
            f"{name}_accepted_tokens_total{{}}": spec["num_accepted_draft_tokens"],
            f'vllm:request_success_total{{finished_reason="{reason}"}}': 1 + (self.others > 0),
            "vllm:generation_tokens_total{}": len(answer["choices"][0]["token_ids"]) + self.strangers,
        }
        for i in range(spec["num_spec_tokens"]):
            rises[f'{name}_accepted_tokens_per_pos_total{{,position="{i}"}}'] = sum(kept > i for kept in accepted)
        with self.lock:
            for key, rise in rises.items():
                self.counts[key] = self.counts.get(key, 0) + rise


SGLANG_INFO = {
    "version": "0.5.23",
    "model_path": "m",
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
"""As `server_info` of sglang 0.5.23 (entrypoints/http_server.py) would have it, of its many fields those of drafts."""


@dataclass
class Sglang:
    """What an SGLang server tells. Written by hand after its sources; `names` are those of one release."""

    info: dict[str, Any] = field(default_factory=lambda: dict(SGLANG_INFO))
    info_path: str = "/server_info"
    histogram: str = "spec_correct_drafts_histogram"
    change: Callable[[int, dict[str, Any]], Reply | None] | None = None
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, path: str) -> Reply:
        if path == "/health":
            return 200, b""
        return as_json(self.info) if path == self.info_path else as_json({"detail": "Not Found"}, 404)

    def post(self, _path: str, body: dict[str, Any]) -> Reply:
        with self.lock:
            self.bodies.append(body)
            number = len(self.bodies) - 1
        completions = recorded_json("completions")
        index = body["input_ids"][0] - FIRST_PROMPT
        source = completions[index if 0 <= index < len(completions) else 1]
        short = cut(source, body["sampling_params"]["max_new_tokens"])
        ids, spec = short["choices"][0]["token_ids"], short["metrics"]["speculative_decoding"]
        meta: dict[str, Any] = {"finish_reason": {"type": "length", "length": 12}, "completion_tokens": len(ids)}
        if spec["num_spec_steps"] and self.info["speculative_algorithm"]:
            histogram = spec["acceptance_histogram"]
            while not histogram[-1]:  # it grows as it is needed
                histogram.pop()
            meta |= {"spec_verify_ct": spec["num_spec_steps"], self.histogram: histogram}
            meta["spec_accept_length"] = len(ids) / spec["num_spec_steps"]
        answer = {"text": "", "output_ids": ids, "meta_info": meta}
        changed = self.change(number, answer) if self.change is not None else None
        return as_json(answer) if changed is None else changed


@contextmanager
def serving(server: Any, port: int = 0) -> Iterator[str]:
    """The URL of a server in a thread."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(server.get(self.path))

        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            except (OSError, ValueError):
                return  # the client has left before it had said all
            if server.key is not None and self.headers.get("Authorization") != f"Bearer {server.key}":
                self.reply(as_json({"error": "Unauthorized"}, 401))
            else:
                self.reply(server.post(self.path, body))

        def reply(self, reply: Reply) -> None:
            try:
                self.send_response(reply[0])
                self.send_header("Content-Length", str(len(reply[1])))
                self.end_headers()
                self.wfile.write(reply[1])
            except OSError:
                return  # the client has left

        def log_message(self, format: str, *args: Any) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def main(args: Sequence[str]) -> int:
    """A process that acts as `vllm serve`, and has a worker as one has.

    FAKE is a JSON object: `pids` a file that gets the process ids, `argv` one that gets the arguments, `dies` what it
    says before it ends at its start, `silent` that it never gets ready, `stubborn` that the worker ignores SIGTERM,
    `from_pp` that `dies` and `silent` are meant from so many pipeline stages on, and anything that `Vllm` takes.
    """
    told: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))
    if args == ["--version"]:
        print("INFO: loading\n0.32.0")
        return 0
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if told.pop("stubborn", False) else ""
    worker = subprocess.Popen([sys.executable, "-c", f"{ignore}import time\ntime.sleep(600)"])
    if pids := told.pop("pids", None):
        time.sleep(0.3 if ignore else 0)  # until it ignores
        Path(pids).write_text(f"{os.getpid()} {worker.pid}")
    if argv := told.pop("argv", None):
        Path(argv).write_text(json.dumps(list(args)))
    print("INFO: the server starts", flush=True)
    if int(args[args.index("--pipeline-parallel-size") + 1]) < told.pop("from_pp", 1):
        told |= {"dies": None, "silent": False}
    if dies := told.pop("dies", None):
        print(dies, "\nINFO: bye", flush=True)
        return 1
    if told.pop("silent", False):
        signal.pause()
    time.sleep(told.pop("sleeps", 0))
    models = {"data": [{"id": args[args.index("--served-model-name") + 1], "root": "r", "parent": None}]}
    with serving(Vllm(**{"models": models, **told}), int(args[args.index("--port") + 1])):
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A real HTTP server on this machine, good and bad: what is retried, counted, given up."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specctl.core.endpoint import answer_remotely, open_endpoint
from specctl.errors import InterruptedRun, MachineError, UsageError
from specctl.recipes.regenerate import regenerate
from specctl.records.conversation import Conversation, Turn
from specctl.records.dialogue import Answered, Dialogue, Failed, Sampling, dialogue
from specctl.records.progress import SilentReporter
from specctl.records.regeneration import RegenerateConfig, RegenerateReport

Reply = tuple[int, dict[str, str], bytes]
GREEDY = Sampling(max_new_tokens=8, temperature=0.0, top_p=1.0, seed=0)


@dataclass
class Server:
    """A chat server and what it was asked; `behave` answers the n-th request for a question."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    times: Counter[str] = field(default_factory=Counter)


def completion(content: Any, *, finish_reason: Any = "stop", **message: Any) -> Reply:
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    body = {"choices": [choice], "usage": {"completion_tokens": 3}}
    return 200, {}, json.dumps(body).encode()


def echo(question: str, _attempt: int) -> Reply:
    return completion(f"answer to {question}")


@contextmanager
def serving(behave: Callable[[str, int], Reply] = echo, *, port: int = 0) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            except (OSError, ValueError):
                return  # the client has left before it had said all
            question = body["messages"][-1]["content"]
            server.requests.append(body)
            server.headers.append(dict(self.headers))
            server.paths.append(self.path)
            server.times[question] += 1
            status, headers, reply = behave(question, server.times[question])
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(reply)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply)
            except OSError:
                return  # the client has left, which some tests are about

        def log_message(self, format: str, *args: Any) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server = Server(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def ask(url: str, *questions: str, tries: int = 3, timeout_s: float = 10.0) -> list[Answered | Failed]:
    """The outcomes in the order of `questions`."""
    endpoint = open_endpoint(url, "m", tries=tries, timeout_s=timeout_s, first_delay_s=0.01)
    rows = [dialogue(Conversation((Turn("user", q),), f"p:{i}")) for i, q in enumerate(questions)]
    asked = [row for row in rows if isinstance(row, Dialogue)]
    outcomes = [
        outcome for some in answer_remotely(iter(asked), endpoint, sampling=GREEDY, concurrency=4) for outcome in some
    ]
    return sorted(outcomes, key=lambda outcome: outcome.dialogue.where)


def only(url: str, **settings: Any) -> Answered | Failed:
    (outcome,) = ask(url, "q", **settings)
    return outcome


def run(url: str, tmp_path: Path, *, num: int = 3, out: str = "out.jsonl", **settings: Any) -> RegenerateReport:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"r{i}", "turns": [f"q{i}", f"more{i}"]}) + "\n" for i in range(num)))
    config = RegenerateConfig("m", (str(prompts),), str(tmp_path / out), endpoint=url, tries=1, **settings)
    return regenerate(config, SilentReporter())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_turn_is_asked_with_the_servers_own_answers_as_history(tmp_path: Path) -> None:
    with serving() as server:
        report = run(server.url, tmp_path, num=1, max_new_tokens=7, temperature=0.5, top_p=0.9, seed=3)
    assert [m["content"] for m in server.requests[1]["messages"]] == ["q0", "answer to q0", "more0"]
    first = server.requests[0]
    assert (first["model"], first["max_tokens"], first["temperature"], first["top_p"]) == ("m", 7, 0.5, 0.9)
    assert first["seed"] != server.requests[1]["seed"]
    assert (report.turns, report.generated_tokens) == (2, 6)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_the_url_is_taken_with_or_without_its_suffix(suffix: str) -> None:
    with serving() as server:
        assert isinstance(only(server.url + suffix), Answered)
    assert server.paths == ["/v1/chat/completions"]


def test_a_path_before_v1_is_kept_and_https_has_its_port() -> None:
    assert open_endpoint("https://host/api/v1", "m").url == "https://host:443/api/v1/chat/completions"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h?a=1"])
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--endpoint"):
        open_endpoint(url, "m")


def test_the_api_key_is_sent_and_never_shown() -> None:
    with serving() as server:
        endpoint = open_endpoint(server.url, "m", api_key="sk-1")
        row = dialogue(Conversation((Turn("user", "q"),), "p:1"))
        assert isinstance(row, Dialogue)
        list(answer_remotely(iter([row]), endpoint, sampling=GREEDY, concurrency=1))
    assert server.headers[0]["Authorization"] == "Bearer sk-1"
    assert "sk-1" not in repr(endpoint)


def test_a_500_is_tried_again() -> None:
    with serving(lambda q, n: echo(q, n) if n == 3 else (500, {}, b"oops")) as server:
        assert isinstance(only(server.url), Answered)
    assert server.times["q"] == 3


@pytest.mark.parametrize("wait", ["1", "date"])
def test_a_429_waits_as_long_as_the_server_asks(wait: str) -> None:
    def behave(question: str, attempt: int) -> Reply:
        after = wait if wait == "1" else formatdate(time.time() + 2, usegmt=True)
        return echo(question, attempt) if attempt == 2 else (429, {"Retry-After": after}, b"{}")

    with serving(behave) as server:
        began = time.monotonic()
        assert isinstance(only(server.url), Answered)
    assert time.monotonic() - began > 0.9


def test_tries_are_bounded() -> None:
    with serving(lambda q, n: (429, {}, b'{"error": {"message": "busy"}}')) as server:
        outcome = only(server.url, tries=4)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, outcome.detail, server.times["q"]) == ("http_429", "HTTP 429: busy", 4)


def test_a_slow_answer_is_given_up_and_tried_again() -> None:
    release = threading.Event()

    def behave(question: str, attempt: int) -> Reply:
        if attempt == 1:
            release.wait(10)
        return echo(question, attempt)

    with serving(behave) as server:
        assert isinstance(only(server.url, timeout_s=0.2), Answered)
        release.set()


def test_a_connection_that_breaks_in_the_middle_is_tried_again() -> None:
    with serving(lambda q, n: echo(q, n) if n > 1 else (200, {"Content-Length": "999"}, b"{")) as server:
        assert isinstance(only(server.url, timeout_s=0.5), Answered)


def test_nobody_at_the_port_is_a_failure_and_a_run_without_answers_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcome = only(f"http://127.0.0.1:{port}", tries=2)
    assert isinstance(outcome, Failed) and outcome.reason == "no_connection"
    with pytest.raises(MachineError, match="none of the rows: no_connection 3"):
        run(f"http://127.0.0.1:{port}", tmp_path)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_server_that_is_gone_ends_the_run_early() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(MachineError, match="no longer be reached"):
        ask(f"http://127.0.0.1:{port}", *map(str, range(500)), tries=1)


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "a"}, "finish_reason": null}]}',
        b'{"choices": [{"message": {"content": "\\ud83d"}, "finish_reason": "stop"}]}',
        b"\xff",
    ],
)
def test_an_answer_that_is_no_completion_is_a_failure_and_not_tried_again(body: bytes) -> None:
    with serving(lambda q, n: (200, {}, body)) as server:
        outcome = only(server.url)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, server.times["q"]) == ("malformed_answer", 1)


def test_a_400_fails_its_row_and_the_next_run_asks_only_that_one(tmp_path: Path) -> None:
    def behave(question: str, attempt: int) -> Reply:
        if question == "q1" and attempt == 1:
            return 400, {}, b'{"message": "too long"}'
        return echo(question, attempt)

    with serving(behave) as server:
        first = run(server.url, tmp_path)
        assert (first.rows, first.failures) == (2, {"http_400": 1})
        assert "HTTP 400: too long" in first.failure_examples[0]
        asked = server.times["q0"]
        second = run(server.url, tmp_path)
        assert (second.rows, second.new_rows, server.times["q0"]) == (3, 1, asked)
    assert [row["id"] for row in rows_of(tmp_path / "out.jsonl")] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_what_no_request_can_pass_ends_the_run_and_names_the_url(status: int) -> None:
    with (
        serving(lambda q, n: (status, {}, b'{"error": {"message": "no"}}')) as server,
        pytest.raises(MachineError, match=f"HTTP {status}: no") as raised,
    ):
        ask(server.url, *map(str, range(100)))
    assert raised.value.where == f"{server.url}/v1/chat/completions"
    assert len(server.requests) < 20


def cut_q1(question: str, _attempt: int) -> Reply:
    return completion(f"answer to {question}", finish_reason="length" if question == "q1" else "stop")


def test_one_of_three_cut_answers_is_reported_as_one_of_three(tmp_path: Path) -> None:
    """vllm-project/speculators#835: `finish_reason` was ignored and 0 of 3 reported."""
    with serving(cut_q1) as server:
        report = run(server.url, tmp_path)
    assert (report.rows, report.truncated, report.unanswered_turns) == (3, 1, 1)
    assert [row["truncated"] for row in rows_of(tmp_path / "out.jsonl")] == [False, True, False]
    assert rows_of(tmp_path / "out.jsonl")[1]["finish_reasons"] == ["length"]
    assert server.times["more1"] == 0


def test_drop_truncated_leaves_two_of_three(tmp_path: Path) -> None:
    with serving(cut_q1) as server:
        report = run(server.url, tmp_path, drop_truncated=True)
    assert (report.rows, report.truncated, report.drops) == (2, 1, {"truncated": 1})
    assert [row["id"] for row in rows_of(tmp_path / "out.jsonl")] == ["r0", "r2"]


def test_a_server_that_dies_midway_is_asked_for_the_rest_only(tmp_path: Path) -> None:
    with serving() as server:
        run(server.url, tmp_path, num=40, out="whole.jsonl")
    down = threading.Event()

    def behave(question: str, attempt: int) -> Reply:
        if question == "more12":
            down.set()
        return (503, {}, b"") if down.is_set() else echo(question, attempt)

    with serving(behave) as server, pytest.raises(MachineError, match="no longer be reached"):
        run(server.url, tmp_path, num=40, concurrency=2)
    done = len(rows_of(tmp_path / "out.jsonl.partial"))
    assert 0 < done < 40
    with serving() as server:
        report = run(server.url, tmp_path, num=40)
    assert report.new_rows == 40 - done
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_reasoning_is_kept_in_the_row_and_not_sent_back(tmp_path: Path) -> None:
    with serving(lambda q, n: completion("a", reasoning_content="because")) as server:
        run(server.url, tmp_path, num=1)
    assert rows_of(tmp_path / "out.jsonl")[0]["messages"][1]["reasoning_content"] == "because"
    assert all("reasoning_content" not in m for m in server.requests[1]["messages"])


def test_a_tool_call_ends_the_conversation_and_is_kept(tmp_path: Path) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    with serving(lambda q, n: completion(None, finish_reason="tool_calls", tool_calls=calls)) as server:
        report = run(server.url, tmp_path, num=1)
    (row,) = rows_of(tmp_path / "out.jsonl")
    assert (row["messages"][-1]["tool_calls"], row["truncated"]) == (calls, False)
    assert (report.unanswered_turns, report.empty_answers, len(server.requests)) == (1, 0, 1)


class _StoppingReporter(SilentReporter):
    def advance(self, amount: int) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_does_not_wait_for_requests_in_flight(tmp_path: Path) -> None:
    release = threading.Event()

    def behave(question: str, attempt: int) -> Reply:
        if question != "q0" and question != "more0":
            release.wait(30)
        return echo(question, attempt)

    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"q{i}", f"more{i}"]}) + "\n" for i in range(6)))
    with serving(behave) as server:
        config = RegenerateConfig("m", (str(prompts),), str(tmp_path / "out.jsonl"), endpoint=server.url)
        began = time.monotonic()
        with pytest.raises(InterruptedRun):
            regenerate(config, _StoppingReporter())
        took = time.monotonic() - began
        release.set()
    assert took < 10
    assert len(rows_of(tmp_path / "out.jsonl.partial")) == 1

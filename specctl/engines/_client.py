"""Talks to a server that decodes: one request, and many at once. Knows HTTP's failures, not what answers hold."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specctl.core.completion import Connections, Endpoint, RequestError, exchange, said
from specctl.core.endpoint import open_endpoint
from specctl.errors import MachineError
from specctl.records.evaluation import Prompt
from specctl.records.progress import Reporter

KEY_FROM: Final = "the environment variable OPENAI_API_KEY, or the one that `--api-key-env` names"
CHAT_PATH: Final = "/v1/chat/completions"
SHOWN: Final = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A server by its root. `connections` are cut when the work ends before its answers."""

    endpoint: Endpoint
    connections: Connections = field(default_factory=Connections)

    @property
    def url(self) -> str:
        return self.endpoint.url


def connect(url: str, *, timeout_s: float, api_key: str | None = None) -> Client:
    """The server at `url`, given with or without `/v1`. Sends nothing yet. Raises UsageError for what is no URL."""
    endpoint = open_endpoint(url, "", timeout_s=timeout_s, tries=1, api_key=api_key, key_from=KEY_FROM)
    return Client(replace(endpoint, path=endpoint.path.removesuffix(CHAT_PATH)))


class NoAnswer(MachineError):
    """Nothing came back, or that the server failed: it may be dying."""


def get_text(client: Client, path: str) -> str | None:
    """What `path` holds, None where there is no such path. Raises MachineError for no answer and for a refusal."""
    response, text = _exchange(client, "GET", path, None)
    return None if response.status == 404 else _accepted(response, text, client.url + path).decode(errors="replace")


def get_json(client: Client, path: str) -> Mapping[str, Any]:
    """The JSON object at `path`. Raises MachineError for no answer, a refusal, and for what is no object."""
    return _object(_ask(client, "GET", path, None), client.url + path)


def post_json(client: Client, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON object that comes back. Raises MachineError as `get_json`."""
    return _object(_ask(client, "POST", path, json.dumps(body).encode()), client.url + path)


def is_up(client: Client, path: str) -> bool:
    """Whether the server answers `path` with 200."""
    quick = replace(client.endpoint, timeout_s=5.0)
    try:
        response, _ = exchange("GET", quick.path + path, quick, client.connections)
    except RequestError:
        return False
    return response.status == 200


def ask_all(
    ask: Callable[[Client, Prompt], Any], prompts: Sequence[Prompt], client: Client, batch: int, reporter: Reporter
) -> list[Any]:
    """What `ask` makes of each prompt, in their order, `batch` of them at once. Raises what it first raises."""
    with pool_of(batch, client) as (pool, its):
        asked: list[Future[Any]] = [pool.submit(ask, its, prompt) for prompt in prompts]
        for future in as_completed(asked):
            future.result()
            reporter.advance(1)
    return [future.result() for future in asked]


@contextmanager
def pool_of(size: int, client: Client) -> Iterator[tuple[ThreadPoolExecutor, Client]]:
    """Threads, and the client that they are to ask by: all end at once when one of them or the user ends the work."""
    client = replace(client, connections=Connections())
    pool = ThreadPoolExecutor(size, thread_name_prefix="specctl-client")
    try:
        yield pool, client
    finally:
        client.connections.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def _ask(client: Client, method: str, path: str, body: bytes | None) -> bytes:
    response, text = _exchange(client, method, path, body)
    return _accepted(response, text, client.url + path)


def _exchange(client: Client, method: str, path: str, body: bytes | None) -> tuple[http.client.HTTPResponse, bytes]:
    try:
        return exchange(method, client.endpoint.path + path, client.endpoint, client.connections, body=body)
    except RequestError as error:
        raise NoAnswer(f"the server does not answer: {error.detail}", where=client.url + path) from None


def _accepted(response: http.client.HTTPResponse, text: bytes, where: str) -> bytes:
    if response.status != 200:
        raise _refusal(response, text, where)
    return text


def _refusal(response: http.client.HTTPResponse, text: bytes, where: str) -> MachineError:
    detail = f"HTTP {response.status}: {said(text) or response.reason}"
    if response.status in (401, 403):
        return MachineError(
            f"the server does not accept the key, {detail}", where=where, hint=f"put it into {KEY_FROM}"
        )
    if response.status >= 500:
        return NoAnswer(f"the server failed, {detail}", where=where)
    return MachineError(f"the server refuses a request, {detail}", where=where)


def _object(text: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        shown = " ".join(text[:SHOWN].decode(errors="replace").split())
        raise MachineError(f"the server's answer is no JSON object: `{shown}`", where=where)
    return found

"""Talks to a server that decodes: one request, and many at once. Knows HTTP's failures, not what answers hold."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specctl.core.completion import Connections, Endpoint, RequestError, exchange, retry_after, said
from specctl.core.endpoint import LONGEST_DELAY_S, open_endpoint
from specctl.errors import MachineError
from specctl.records.evaluation import Prompt
from specctl.records.progress import Reporter

KEY_FROM: Final = "the environment variable OPENAI_API_KEY, or the one that `--api-key-env` names"
CHAT_PATH: Final = "/v1/chat/completions"
SHOWN: Final = 300
TRIES: Final = 5
BUSY: Final = frozenset({429, 502, 503, 504})
"""What a server, or the proxy before it, says when it is busy; worth another try."""

QUICK_S: Final = 120.0
"""The longest for what needs no decoding."""


@dataclass(frozen=True, slots=True)
class Client:
    """A server by its root. `connections` are cut when the work ends before its answers.

    `key_from` says where the user puts a key.
    """

    endpoint: Endpoint
    connections: Connections = field(default_factory=Connections)
    key_from: str = KEY_FROM

    @property
    def url(self) -> str:
        return self.endpoint.url


def connect(url: str, *, timeout_s: float, api_key: str | None = None, key_from: str = KEY_FROM) -> Client:
    """The server at `url`, given with or without `/v1`. Sends nothing yet.

    Raises UsageError for what is no URL, and for a key that no header can carry.
    """
    endpoint = open_endpoint(url, "", timeout_s=timeout_s, tries=TRIES, api_key=api_key, key_from=key_from)
    return Client(replace(endpoint, path=endpoint.path.removesuffix(CHAT_PATH)), key_from=key_from)


class NoAnswer(MachineError):
    """Nothing came back, or that the server failed: it may be dying."""


class Refused(MachineError):
    """The server lives and will not answer this request."""


def get_text(client: Client, path: str) -> str | None:
    """What `path` holds, None where there is no such path. Raises MachineError for no answer and for a refusal."""
    response, text = _exchange(client, "GET", path, None)
    return None if response.status == 404 else _accepted(response, text, client, path).decode(errors="replace")


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
        asked: list[Future[Any]] = [pool.submit(ask_for, ask, its, prompt) for prompt in prompts]
        for future in as_completed(asked):
            future.result()
            reporter.advance(1)
    return [future.result() for future in asked]


def ask_for(ask: Callable[[Client, Prompt], Any], client: Client, prompt: Prompt) -> Any:
    """What `ask` makes of a prompt. Raises Refused naming the prompt that was."""
    try:
        return ask(client, prompt)
    except Refused as error:
        detail = f"prompt `{prompt.id}` of {len(prompt.ids)} tokens: {error.message}"
        raise Refused(detail, where=error.where, hint=error.hint) from None


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
    """The answer, patiently: a busy server is asked again. Counts the same, and is slower for it."""
    for attempt in range(client.endpoint.tries):
        response, text = _exchange(client, method, path, body)
        if response.status not in BUSY or attempt + 1 == client.endpoint.tries:
            break
        asked = retry_after(response.getheader("Retry-After"))
        delay_s = asked if asked is not None else client.endpoint.first_delay_s * 2**attempt
        if client.connections.stopped.wait(min(delay_s, LONGEST_DELAY_S)):
            break
    return _accepted(response, text, client, path)


def _exchange(client: Client, method: str, path: str, body: bytes | None) -> tuple[http.client.HTTPResponse, bytes]:
    limit_s = client.endpoint.timeout_s if body is not None else min(client.endpoint.timeout_s, QUICK_S)
    endpoint = replace(client.endpoint, timeout_s=limit_s)
    try:
        return exchange(method, endpoint.path + path, endpoint, client.connections, body=body)
    except RequestError as error:
        hint = "is it running, and is the address right?"
        if error.reason == "timeout":
            hint = "is it busy or hung? fewer `--max-new-tokens` or a smaller `--batch` make answers come sooner"
        raise NoAnswer(f"the server does not answer: {error.detail}", where=client.url + path, hint=hint) from None


def _accepted(response: http.client.HTTPResponse, text: bytes, client: Client, path: str) -> bytes:
    if response.status != 200:
        raise _refusal(response, text, client, path)
    return text


def _refusal(response: http.client.HTTPResponse, text: bytes, client: Client, path: str) -> MachineError:
    detail, where = f"HTTP {response.status}: {said(text) or response.reason}", client.url + path
    if response.status in (401, 403):
        hint = f"put it into {client.key_from}"
        return MachineError(f"the server does not accept the key, {detail}", where=where, hint=hint)
    if response.status >= 500:
        hint = "its log says why; run again when it answers"
        return NoAnswer(f"the server failed, {detail}", where=where, hint=hint)
    if response.status == 429:
        return Refused(f"the server stays busy, {detail}", where=where, hint="a smaller `--batch` asks less at once")
    return Refused(f"the server refuses a request, {detail}", where=where)


def _object(text: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        shown = " ".join(text[:SHOWN].decode(errors="replace").split())
        raise MachineError(f"the server's answer is no JSON object: `{shown}`", where=where)
    return found

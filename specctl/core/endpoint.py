"""Answers from a server that speaks OpenAI's chat completions. Knows rows and retries, not HTTP.

A server applies what its own generation config says where the request is silent (top-k, penalties).
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, Final
from urllib.parse import urlsplit

from specctl.core.completion import Connections, Endpoint, RequestError, ask
from specctl.errors import MachineError, UsageError
from specctl.records.dialogue import Answer, Answered, Dialogue, Failed, Sampling, next_question

FIRST_DELAY_S: Final = 0.5
LONGEST_DELAY_S: Final = 60.0
UNREACHABLE: Final = frozenset({"no_connection", "timeout", "http_502", "http_503", "http_504"})
SENT_KEYS: Final = ("role", "content", "name", "tool_calls")


def open_endpoint(
    url: str,
    model: str,
    *,
    timeout_s: float = 600.0,
    tries: int = 5,
    first_delay_s: float = FIRST_DELAY_S,
    api_key: str | None = None,
    key_from: str = "`--api-key-env NAME`",
) -> Endpoint:
    """The endpoint at `url`, given with or without `/v1` or `/v1/chat/completions`.

    `key_from` says where the user puts a key. Raises UsageError for what is no http or https URL, and for a
    key that no header can carry.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"`--endpoint {url}` is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(
            f"`--endpoint {url}` is no http or https URL of a server",
            hint="for example `--endpoint http://localhost:8000/v1`",
        )
    if parts.username is not None:
        raise UsageError("`--endpoint` holds a user name or password", hint=f"use {key_from}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise UsageError("the API key holds characters that no HTTP header can carry")
    is_https = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return Endpoint(
        host=parts.hostname,
        port=port if port is not None else 443 if is_https else 80,
        path=f"{path}/v1/chat/completions",
        is_https=is_https,
        model=model,
        timeout_s=timeout_s,
        tries=tries,
        first_delay_s=first_delay_s,
        api_key=api_key,
    )


def answer_remotely(
    dialogues: Iterable[Dialogue], endpoint: Endpoint, *, sampling: Sampling, concurrency: int
) -> Generator[list[Answered | Failed], None, None]:
    """What came back, in the order it came back; at most `2 * concurrency` rows are held.

    Raises MachineError when the server refuses as such (key, path, model), or can no longer be
    reached: after `2 * concurrency` rows in a row without a connection.
    """
    connections = Connections()
    rest = iter(dialogues)
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="specctl-endpoint")
    lost = 0
    try:
        asked: set[Future[Answered | Failed]] = set()
        while True:
            fresh = islice(rest, 2 * concurrency - len(asked))
            asked.update(pool.submit(_answer_all, row, endpoint, sampling, connections) for row in fresh)
            if not asked:
                return
            done, asked = wait(asked, return_when=FIRST_COMPLETED)
            results = [future.result() for future in done if future.exception() is None]
            yield results
            for future in done:
                future.result()  # what concerns all requests is raised here, after what did come back
            for result in results:
                lost = lost + 1 if isinstance(result, Failed) and result.reason in UNREACHABLE else 0
            if lost >= 2 * concurrency:
                raise _unreachable(endpoint, results[-1])
    finally:
        connections.stop()
        pool.shutdown(wait=True, cancel_futures=True)


def _unreachable(endpoint: Endpoint, last: Answered | Failed) -> MachineError:
    detail = last.detail if isinstance(last, Failed) else "no connection"
    return MachineError(
        f"the endpoint can no longer be reached: {detail}",
        where=endpoint.url,
        hint="run again when the server is back; finished rows are kept",
    )


def _answer_all(row: Dialogue, endpoint: Endpoint, sampling: Sampling, connections: Connections) -> Answered | Failed:
    answers: list[Answer] = []
    try:
        while (messages := next_question(row, answers)) is not None:
            body = _body(row, messages, endpoint, sampling)
            answers.append(_patiently(json.dumps(body).encode(), endpoint, connections))
    except RequestError as refused:
        return Failed(row, refused.reason, refused.detail)
    return Answered(row, answers)


def _body(
    row: Dialogue, messages: Sequence[Mapping[str, Any]], endpoint: Endpoint, sampling: Sampling
) -> dict[str, Any]:
    turn = sum(message["role"] == "assistant" for message in messages)
    # Reasoning of earlier turns and keys of the data set are not part of what an API takes.
    history = [{key: message[key] for key in SENT_KEYS if key in message} for message in messages]
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": history,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed_of(row.key, str(turn)),
    }
    return {**body, "tools": list(row.tools)} if row.tools else body


def _patiently(body: bytes, endpoint: Endpoint, connections: Connections) -> Answer:
    for attempt in range(endpoint.tries):
        try:
            return ask(body, endpoint, connections)
        except RequestError as refused:
            if not refused.is_retried or attempt + 1 == endpoint.tries:
                raise
            delay = refused.delay_s if refused.delay_s is not None else endpoint.first_delay_s * 2**attempt
            if connections.stopped.wait(min(delay, LONGEST_DELAY_S)):
                raise RequestError("stopped", "the run was stopped", is_retried=False) from None
    raise AssertionError("the last attempt returns or raises")

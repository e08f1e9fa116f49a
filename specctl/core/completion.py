"""One chat completion over HTTP, and what its failure means. Knows no rows and no retries.

Source: platform.openai.com/docs/api-reference/chat.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from specctl.errors import MachineError
from specctl.records.dialogue import Answer

CONNECT_TIMEOUT_S: Final = 30.0
# What a server says when it is busy or being restarted; worth another try.
RETRIED: Final = frozenset({408, 409, 425, 429, *range(500, 600)})
FATAL: Final = frozenset({401, 403, 404, 405, *range(300, 400)})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A served model and how patiently it is asked."""

    host: str
    port: int
    path: str
    is_https: bool
    model: str
    timeout_s: float
    tries: int
    first_delay_s: float
    api_key: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_https}://{host}:{self.port}{self.path}"


class RequestError(Exception):
    """One request came to nothing. `delay_s` is what the server asks to wait, if it does."""

    def __init__(self, reason: str, detail: str, *, is_retried: bool, delay_s: float | None = None) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.is_retried, self.delay_s = reason, detail, is_retried, delay_s


class Connections:
    """The open connections of a run: a class, because stopping must cut them from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()
        self.stopped = threading.Event()

    def add(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._open.add(connection)

    def remove(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._open.discard(connection)

    def stop(self) -> None:
        """End all requests now; a thread blocked in one would hold the program up to its timeout."""
        self.stopped.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    _shut_down(connection.sock)


def ask(body: bytes, endpoint: Endpoint, connections: Connections) -> Answer:
    """The answer to one request.

    Raises RequestError for what concerns this request, MachineError for what concerns all of them.
    """
    response, text = exchange("POST", endpoint.path, endpoint, connections, body=body)
    if response.status != 200:
        raise _refusal(response, text, endpoint)
    return _parse(text)


def exchange(
    method: str, path: str, endpoint: Endpoint, connections: Connections, *, body: bytes | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    """What the endpoint's server says to one request, whatever its status.

    Raises RequestError where nothing came back, MachineError for a certificate that is not trusted.
    """
    connection = _connection(endpoint)
    connections.add(connection)
    try:
        connection.connect()
        connection.sock.settimeout(endpoint.timeout_s)
        if connections.stopped.is_set():
            raise RequestError("stopped", "the run was stopped", is_retried=False)
        connection.request(method, path, body=body, headers=_headers(endpoint))
        response = connection.getresponse()
        return response, response.read()
    except TimeoutError:
        raise RequestError("timeout", f"no answer within {endpoint.timeout_s:g} s", is_retried=True) from None
    except ssl.SSLCertVerificationError as error:
        raise MachineError(f"the endpoint's certificate is not trusted: {error}", where=endpoint.url) from error
    except (OSError, http.client.HTTPException) as error:
        detail = str(error) or type(error).__name__
        raise RequestError("no_connection", detail, is_retried=True) from None
    finally:
        connections.remove(connection)
        connection.close()


def _connection(endpoint: Endpoint) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if endpoint.is_https else http.client.HTTPConnection
    return kind(endpoint.host, endpoint.port, timeout=min(CONNECT_TIMEOUT_S, endpoint.timeout_s))


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    return {**headers, "Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else headers


def _refusal(response: http.client.HTTPResponse, text: bytes, endpoint: Endpoint) -> Exception:
    status = response.status
    detail = f"HTTP {status}: {said(text) or response.reason}"
    if status in FATAL:
        raise MachineError(
            f"the endpoint refuses every request, {detail}",
            where=endpoint.url,
            hint="TARGET is the served model's name, the key comes from `--api-key-env`; are both right?",
        )
    delay_s = retry_after(response.getheader("Retry-After"))
    return RequestError(f"http_{status}", detail, is_retried=status in RETRIED, delay_s=delay_s)


def said(text: bytes) -> str:
    """What a server says in an error's body, whatever its shape, on one connections."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text.decode(errors="replace")
    for key in ("error", "message", "detail"):
        body = body[key] if isinstance(body, Mapping) and key in body else body
    return " ".join((body if isinstance(body, str) else json.dumps(body)).split())[:200]


def retry_after(value: str | None) -> float | None:
    """Seconds to wait; the header holds seconds or a date. Source: RFC 9110, 10.2.3."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _parse(text: bytes) -> Answer:
    try:
        body = json.loads(text)
        choice = body["choices"][0]
        message, finish_reason = choice["message"], choice["finish_reason"]
        content, calls = message.get("content"), message.get("tool_calls") or []
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        tokens = (body.get("usage") or {}).get("completion_tokens")
        # A text with half of a surrogate pair is none that UTF-8 can write.
        json.dumps(message, ensure_ascii=False).encode()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _malformed(f"{type(error).__name__}: {error}") from None
    if not isinstance(finish_reason, str) or not isinstance(content, str | None):
        raise _malformed("`finish_reason` and `content` are to be texts")
    if content is None and not calls and not reasoning:
        raise _malformed("it holds no content")
    if not isinstance(calls, list) or not isinstance(reasoning, str | None):
        raise _malformed("`tool_calls` is a list and `reasoning_content` a text")
    return Answer(content or "", finish_reason, tokens if type(tokens) is int else None, reasoning or None, calls)


def _malformed(detail: str) -> RequestError:
    return RequestError("malformed_answer", f"the answer is no chat completion: {detail}", is_retried=False)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it was closed in the meantime

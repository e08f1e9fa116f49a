"""Tools and their calls in rows of chat data, and JSON inside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from specctl.errors import DataError

_SURROGATE_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")


class RowError(DataError):
    """A row that gives no record; becomes its Dropped."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def parsed(raw: bytes | str, reason: str) -> Any:
    try:
        text = raw.decode() if isinstance(raw, bytes) else raw
    except UnicodeDecodeError as error:
        raise RowError("bad_unicode", f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RowError("bad_unicode", "a string holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise RowError(reason, f"not JSON: {error}") from None
    return value


def _offered(fields: Mapping[str, Any]) -> Any:
    """The tools; OpenAI's older `functions` are the same without a wrapper."""
    functions = fields.get("functions")
    if fields.get("tools") or not isinstance(functions, list):
        return fields.get("tools")
    return [{"type": "function", "function": function} for function in functions if isinstance(function, dict)]


def tool_calls(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls with their arguments as objects; OpenAI's older `function_call` is one call."""
    calls = item.get("tool_calls")
    if calls is None and item.get("function_call") is not None:
        calls = [{"type": "function", "function": item["function_call"]}]
    if isinstance(calls, str):
        calls = parsed(calls, "bad_tool_arguments")
    if not isinstance(calls or [], list) or not all(isinstance(call, dict) for call in calls or ()):
        raise RowError("bad_tool_arguments", "`tool_calls` is a list of objects")
    return [_tool_call(call) for call in calls or ()]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = parsed(arguments, "bad_tool_arguments") if arguments.strip() else {}
    if arguments is not None and not isinstance(arguments, dict):
        raise RowError("bad_tool_arguments", f"arguments are an object; found {type(arguments).__name__}")
    return call if arguments is None else {**call, "arguments": arguments}


def tools(fields: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a row offers."""
    value = _offered(fields)
    found = parsed(value, "bad_tools") if isinstance(value, str) and value.strip() else value
    if not found:
        return None
    if not isinstance(found, list):
        raise RowError("bad_tools", f"`tools` is a list; found {type(found).__name__}")
    found = [parsed(tool, "bad_tools") if isinstance(tool, str) else tool for tool in found]
    if not all(isinstance(tool, dict) for tool in found):
        raise RowError("bad_tools", "a tool is an object")
    return found

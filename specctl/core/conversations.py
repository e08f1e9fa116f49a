"""Rows of chat data as conversations, and what of them is refused.

Knows the field names of public data sets; knows no tokenizer and no template. The first key of `KINDS`
with a value decides what a row is:
    input_ids       tokenised elsewhere, with `loss_mask`
    messages        turns of role/content (or from/value); `tools` beside them
    conversations   the same, as ShareGPT writes it
    turns           MT-Bench: questions to be asked one after the other; kept apart, not merged
    prompt          one user turn, or turns; with `completion` or `response` an answer to it
    question        one user turn (GSM8K; its `answer` is a worked solution, not a chat answer: not read)
    text            running text

`system` or `system_prompt` beside turns becomes their first turn when they have none. A user or system
role that speaks twice in a row is merged, a blank line between; so is an assistant without tool calls
and reasoning. Tool results stay apart. A null content is empty. An assistant turn with `weight` 0 is not
supervised; a row with `truncated`, or whose `finish_reason` is `length`, ends in a cut answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast, get_args

from specctl.core.datafiles import check_files, raw_rows
from specctl.core.toolcalls import RowError, parsed, tool_calls, tools
from specctl.errors import DataError
from specctl.records.conversation import Conversation, PlainText, Role, Tokenized, Turn
from specctl.records.sample import Dropped

Row = Conversation | PlainText | Tokenized | Dropped

KINDS: Final = ("input_ids", "messages", "conversations", "turns", "prompt", "question", "text")
ID_KEYS: Final = ("id", "conversation_id", "question_id", "task_id", "uuid")
ROLE_NAMES: Final[Mapping[str, Role]] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
CUT: Final = ("length", "max_tokens")
"""What servers call the reason of an answer that was cut."""
KEPT_APART: Final = ("tool_calls", "reasoning_content", "reasoning", "thinking")
NO_ROLES: Final[Mapping[str, str]] = MappingProxyType({})
MAX_ID: Final = 2**31 - 1  # shards hold ids as int32

_TURN_KEYS: Final = frozenset(("role", "from", "content", "value", "function_call"))


def read_rows(paths: Sequence[str], *, role_map: Mapping[str, str] = NO_ROLES) -> Iterator[Row]:
    """The rows of JSONL (`.jsonl`, `.gz`), JSON and Parquet files in order; `-` is JSONL on stdin.

    Every row comes out, a refused one as Dropped with its reason; `where` is `file:LINE` (the row's
    number in Parquet and JSON arrays). `role_map` names further roles. Only a JSON array is read whole.
    Raises DataError for what is wrong with the files as such (missing, damaged), for a role that
    nobody named and for a turn that says two things at once.
    """
    check_files(paths)
    roles = _role_names(role_map)
    return (_row(raw, where, roles) for path in paths for where, raw in raw_rows(path))


def _role_names(role_map: Mapping[str, str]) -> Mapping[str, Role]:
    known = get_args(Role)
    for name, role in role_map.items():
        if role not in known:
            raise DataError(
                f"`--role-map {name}={role}` names no role; there are {', '.join(known)}",
                hint=f"for example `--role-map {name}=assistant`",
            )
    return {**ROLE_NAMES, **{name.lower(): cast(Role, role) for name, role in role_map.items()}}


def _row(raw: Any, where: str, roles: Mapping[str, Role]) -> Row:
    try:
        fields = parsed(raw, "bad_json") if isinstance(raw, bytes) else raw
        if not isinstance(fields, dict):
            raise RowError("bad_json", f"a row is a JSON object; found {type(fields).__name__}")
        return _record(fields, where, roles)
    except RowError as refused:
        return Dropped(where, refused.reason, refused.message)


def _record(fields: Mapping[str, Any], where: str, roles: Mapping[str, Role]) -> Row:
    kind = next((key for key in KINDS if fields.get(key) is not None), None)
    if kind is None:
        if any(key in fields for key in KINDS):
            raise RowError("empty", "the row holds nothing")
        raise RowError("unknown_row", f"it has {', '.join(fields) or 'no keys'}; known are {', '.join(KINDS)}")
    row_id = next((str(fields[key]) for key in ID_KEYS if _is_id(fields.get(key))), None)
    if kind == "input_ids":
        return _tokenized(fields, where, row_id)
    if kind == "text":
        return PlainText(_filled(fields["text"]), where, row_id)
    turns = _with_system(_turns(kind, fields, where, roles), fields)
    _check_order(turns)
    category = fields["category"] if isinstance(fields.get("category"), str) else None
    is_cut = _is_cut(fields) and turns[-1].role == "assistant"
    return Conversation(tuple(turns), where, row_id, tools(fields), category, is_cut)


def _is_cut(fields: Mapping[str, Any]) -> bool:
    """Whether the row says that its last answer stopped at a limit: then it has no end to be learnt."""
    reasons = fields.get("finish_reasons")
    reason = reasons[-1] if isinstance(reasons, list) and reasons else fields.get("finish_reason")
    return str(fields.get("truncated")).lower() == "true" or reason in CUT


def _is_id(value: Any) -> bool:
    return isinstance(value, (str, int, float)) and value != ""


def _tokenized(fields: Mapping[str, Any], where: str, row_id: str | None) -> Tokenized:
    ids, mask = fields["input_ids"], fields.get("loss_mask")
    if mask is None:
        raise RowError("no_loss_mask", "`input_ids` without `loss_mask`")
    if not (isinstance(ids, list) and isinstance(mask, list)):
        raise RowError("bad_tokens", "`input_ids` and `loss_mask` are lists")
    if not ids:
        raise RowError("empty", "`input_ids` holds nothing")
    if len(ids) != len(mask):
        raise RowError("bad_tokens", f"{len(ids)} input ids and {len(mask)} mask values")
    if not all(type(i) is int and 0 <= i <= MAX_ID for i in ids):
        raise RowError("bad_tokens", "`input_ids` are integers from 0 on")
    if not all(isinstance(m, int) and m in (0, 1) for m in mask):
        raise RowError("bad_tokens", "`loss_mask` holds 0 and 1 only")
    return Tokenized(ids, [int(m) for m in mask], where, row_id)


def _turns(kind: str, fields: Mapping[str, Any], where: str, roles: Mapping[str, Role]) -> list[Turn]:
    value = fields[kind]
    if kind == "turns" and isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return [Turn("user", _filled(item)) for item in value]
    if kind in ("prompt", "question"):
        turns = _spoken(value, "user", where, roles)
        answer = fields.get("completion") or fields.get("response")
        if kind == "prompt" and answer:
            turns += _spoken(answer, "assistant", where, roles)
        return _merged(turns)
    if isinstance(value, str):
        value = parsed(value, "bad_turn")
    if not isinstance(value, list):
        raise RowError("bad_turn", f"`{kind}` is a list of turns; found {type(value).__name__}")
    return _merged([_turn(item, where, roles) for item in value])


def _spoken(value: Any, role: Role, where: str, roles: Mapping[str, Role]) -> list[Turn]:
    """A bare text is one turn of `role`; a list is turns that name their own."""
    if isinstance(value, list):
        return [_turn(item, where, roles) for item in value]
    return [Turn(role, _filled(value))]


def _filled(value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("bad_turn", f"a text is expected; found {type(value).__name__}")
    if not value:
        raise RowError("empty", "the text is empty")
    return value


def _turn(item: Any, where: str, roles: Mapping[str, Role]) -> Turn:
    if not isinstance(item, dict):
        raise RowError("bad_turn", f"a turn is a JSON object; found {type(item).__name__}")
    found = {_role(item[key], where, roles) for key in ("role", "from") if item.get(key) is not None}
    if not found:
        raise RowError("bad_turn", "a turn has neither `role` nor `from`")
    contents = [item[key] for key in ("content", "value") if item.get(key) is not None]
    if len(found) > 1 or (len(contents) > 1 and contents[0] != contents[1]):
        keys = "`role` and `from`" if len(found) > 1 else "`content` and `value`"
        raise DataError(f"a turn has {keys}, and they differ", where=where, hint="remove the wrong one")
    extra = {key: value for key, value in item.items() if key not in _TURN_KEYS and value is not None}
    if calls := tool_calls(item):
        extra["tool_calls"] = calls
    return Turn(found.pop(), _content(contents[0] if contents else ""), extra)


def _role(name: Any, where: str, roles: Mapping[str, Role]) -> Role:
    role = roles.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise DataError(
            f"role `{name}` is not known; known are {', '.join(sorted(roles))}",
            where=where,
            hint=f"write one of them in the file; `specctl extract` also takes `--role-map {name}=assistant`",
        )
    return role


def _content(value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RowError("bad_turn", f"content is a text; found {type(value).__name__}")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise RowError("not_text", f"a content part is `{kind}`; only text is read")
    return text


def _with_system(turns: list[Turn], fields: Mapping[str, Any]) -> list[Turn]:
    system = fields.get("system") or fields.get("system_prompt")
    if not isinstance(system, str) or any(turn.role == "system" for turn in turns):
        return turns
    return [Turn("system", system), *turns]


def _check_order(turns: Sequence[Turn]) -> None:
    first = next((turn.role for turn in turns if turn.role != "system"), None)
    if first is None:
        raise RowError("empty", "the conversation has no turns")
    if first == "assistant":
        raise RowError("starts_with_assistant", "the assistant speaks first, to no question")


def _merged(turns: Iterable[Turn]) -> list[Turn]:
    merged: list[Turn] = []
    for turn in turns:
        if merged and _joins(merged[-1], turn):
            last = merged.pop()
            content = "\n\n".join(text for text in (last.content, turn.content) if text)
            turn = Turn(turn.role, content, {**turn.extra, **last.extra})
        merged.append(turn)
    return merged


def _joins(last: Turn, turn: Turn) -> bool:
    if last.role != turn.role or turn.role == "tool" or last.extra.get("weight") != turn.extra.get("weight"):
        return False
    return not any(key in turn.extra or key in last.extra for key in KEPT_APART)

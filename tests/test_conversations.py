"""Files and rows of chat data: what they become, and what of them is refused."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specctl.core.conversations import read_rows
from specctl.errors import DataError
from specctl.records.conversation import Conversation, PlainText, Tokenized
from specctl.records.sample import Dropped

U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "b"}


def read(folder: Path, *rows: Any, name: str = "d.jsonl", **options: Any) -> list[Any]:
    path = folder / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return list(read_rows([str(path)], **options))


def one(folder: Path, row: Any, **options: Any) -> Any:
    (found,) = read(folder, row, **options)
    return found


def said(row: Conversation) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in row.turns]


# Row kinds


def test_sharegpt_keeps_every_turn(tmp_path):
    turns = (("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
    row = one(tmp_path, {"conversations": [{"from": r, "value": c} for r, c in turns]})
    assert said(row) == [
        ("system", "s"),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
        ("assistant", "d"),
    ]


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"prompt": "p"}, [("user", "p")]),
        ({"prompt": "p", "completion": "c"}, [("user", "p"), ("assistant", "c")]),
        ({"prompt": "p", "response": "c"}, [("user", "p"), ("assistant", "c")]),
        ({"prompt": [U], "completion": [A]}, [("user", "q"), ("assistant", "b")]),
        ({"question": "q", "answer": "#### 18"}, [("user", "q")]),
        ({"turns": ["a", "b"]}, [("user", "a"), ("user", "b")]),
        ({"messages": [U, A], "text": "t", "prompt": "p"}, [("user", "q"), ("assistant", "b")]),
        ({"messages": None, "conversations": [U, A]}, [("user", "q"), ("assistant", "b")]),
        ({"messages": json.dumps([U, A])}, [("user", "q"), ("assistant", "b")]),
        ({"system": "s", "conversations": [U, A]}, [("system", "s"), ("user", "q"), ("assistant", "b")]),
    ],
)
def test_row_kind_becomes_its_turns(tmp_path, row, turns):
    assert said(one(tmp_path, row)) == turns


def test_text_is_plain_text(tmp_path):
    assert one(tmp_path, {"text": "t", "id": 3}) == PlainText("t", f"{tmp_path / 'd.jsonl'}:1", "3")


def test_ready_tokens_pass_as_they_are(tmp_path):
    row = one(tmp_path, {"input_ids": [5, 0], "loss_mask": [False, True]})
    assert isinstance(row, Tokenized)
    assert (row.input_ids, row.loss_mask) == ([5, 0], [0, 1])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": 7, "uuid": "u"}, "7"),
        ({"conversation_id": "c"}, "c"),
        ({"question_id": 81}, "81"),
        ({"task_id": "HumanEval/0"}, "HumanEval/0"),
        ({"id": None, "uuid": "u"}, "u"),
        ({"id": ""}, None),
        ({}, None),
    ],
)
def test_row_id_is_the_first_that_is_there(tmp_path, row, expected):
    assert one(tmp_path, {**row, "prompt": "p"}).row_id == expected


def test_category_of_a_question_is_kept(tmp_path):
    row = one(tmp_path, {"question_id": 81, "category": "writing", "turns": ["a", "b"]})
    assert (row.row_id, row.category) == ("81", "writing")


# Turns


def test_roles_have_aliases_in_any_case(tmp_path):
    names = ["Developer", "HUMAN", "ChatGPT", "observation", "bard", "ipython", "function", "Bot"]
    row = one(tmp_path, {"conversations": [{"from": n, "value": n} for n in names]})
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [turn.role for turn in row.turns] == roles


def test_unknown_role_is_an_error_that_lists_roles_and_names_the_line(tmp_path):
    with pytest.raises(DataError, match=r"`laguna_s` is not known.*assistant.*human") as caught:
        read(tmp_path, {"messages": [U]}, {"conversations": [{"from": "laguna_s", "value": "x"}]})
    assert caught.value.where == f"{tmp_path / 'd.jsonl'}:2"
    assert "--role-map laguna_s=assistant" in caught.value.hint


def test_unknown_role_is_mapped_when_told_how(tmp_path):
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "laguna_s", "value": "b"}]}
    assert said(one(tmp_path, row, role_map={"laguna_s": "assistant"})) == [("user", "a"), ("assistant", "b")]


def test_role_map_to_no_role_is_refused_before_reading():
    with pytest.raises(DataError, match="names no role"):
        read_rows(["-"], role_map={"laguna_s": "helper"})


def test_turn_that_says_two_things_is_an_error(tmp_path):
    turn = {"role": "user", "content": "a", "value": "b"}
    with pytest.raises(DataError, match="`content` and `value`") as caught:
        one(tmp_path, {"messages": [turn]})
    assert caught.value.where == f"{tmp_path / 'd.jsonl'}:1"
    with pytest.raises(DataError, match="`role` and `from`"):
        one(tmp_path, {"messages": [{"role": "user", "from": "gpt", "value": "b"}]})


def test_turn_that_says_one_thing_twice_is_fine(tmp_path):
    turn = {"role": "user", "from": "human", "content": "a", "value": "a"}
    assert said(one(tmp_path, {"messages": [turn]})) == [("user", "a")]


def test_null_content_is_empty(tmp_path):
    row = one(tmp_path, {"messages": [U, {"role": "assistant", "content": None}]})
    assert said(row) == [("user", "q"), ("assistant", "")]


def test_same_role_twice_in_a_row_is_merged_with_a_blank_line(tmp_path):
    system = {"role": "system", "content": "s"}
    row = one(tmp_path, {"messages": [system, {**system, "role": "developer"}, U, U, A, A]})
    assert said(row) == [("system", "s\n\ns"), ("user", "q\n\nq"), ("assistant", "b\n\nb")]


def test_tool_results_and_tool_calls_are_not_merged(tmp_path):
    tool = {"role": "tool", "content": "42"}
    asks = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    row = one(tmp_path, {"messages": [U, asks, A, tool, tool]})
    assert [turn.role for turn in row.turns] == ["user", "assistant", "assistant", "tool", "tool"]


def test_what_else_a_turn_has_is_kept_for_the_template(tmp_path):
    tool = {"role": "tool", "content": "42", "name": "f", "tool_call_id": "1", "weight": None}
    row = one(tmp_path, {"messages": [U, tool]})
    assert row.turns[1].extra == {"name": "f", "tool_call_id": "1"}


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
def test_tool_arguments_are_objects_however_they_were_written(tmp_path, arguments):
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
    row = one(tmp_path, {"messages": [U, {"role": "assistant", "content": None, "tool_calls": calls}]})
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert row.turns[1].extra["tool_calls"] == expected


def test_older_function_call_is_one_tool_call(tmp_path):
    turn = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    row = one(tmp_path, {"messages": [U, turn]})
    assert row.turns[1].extra["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]', ['{"name": "f"}']])
def test_tools_are_objects_however_they_were_written(tmp_path, tools):
    assert one(tmp_path, {"messages": [U, A], "tools": tools}).tools == [{"name": "f"}]


@pytest.mark.parametrize("tools", [[], "", None, "[]"])
def test_no_tools_are_none(tmp_path, tools):
    assert one(tmp_path, {"messages": [U, A], "tools": tools}).tools is None


def test_text_parts_are_joined(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said(one(tmp_path, {"messages": [{"role": "user", "content": parts}]})) == [("user", "ab")]


# What is dropped


CALL = {"name": "f", "arguments": "{bad"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{broken", "bad_json"),
        ("[1]", "bad_json"),
        ("3", "bad_json"),
        ("[" * 100_000, "bad_json"),
        ({}, "unknown_row"),
        ({"other": 1}, "unknown_row"),
        ({"messages": None}, "empty"),
        ({"messages": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"messages": [{"role": "system", "content": "s"}]}, "empty"),
        ({"messages": [A]}, "starts_with_assistant"),
        ({"messages": [{"role": "system", "content": "s"}, A, U]}, "starts_with_assistant"),
        ({"messages": ["q"]}, "bad_turn"),
        ({"messages": [{"content": "q"}]}, "bad_turn"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_turn"),
        ({"messages": 3}, "bad_turn"),
        ({"text": 3}, "bad_turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not_text"),
        ({"messages": [U, A], "tools": "{bad"}, "bad_tools"),
        ({"messages": [U, A], "tools": {"name": "f"}}, "bad_tools"),
        ({"messages": [U, {"role": "assistant", "tool_calls": [{"function": CALL}]}]}, "bad_tool_arguments"),
        ({"messages": [U, {"role": "assistant", "tool_calls": [CALL]}]}, "bad_tool_arguments"),
        ({"messages": [U, {"role": "assistant", "tool_calls": [3]}]}, "bad_tool_arguments"),
        ({"input_ids": [1, 2]}, "no_loss_mask"),
        ({"input_ids": [], "loss_mask": []}, "empty"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_tokens"),
        ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "bad_tokens"),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "bad_tokens"),
        ({"input_ids": [1, 2**31], "loss_mask": [1, 1]}, "bad_tokens"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "bad_tokens"),
        ('{"text": "\\ud83d"}', "bad_unicode"),
        ('{"messages": [{"role": "user", "content": "\\uDE00 x"}]}', "bad_unicode"),
        ({"messages": [U, A], "tools": '[{"name": "\\ud83d"}]'}, "bad_unicode"),
    ],
)
def test_useless_row_is_dropped_with_its_reason(tmp_path, row, reason):
    good = {"text": "t"}
    found = read(tmp_path, good, row, good)
    assert [type(r) for r in found] == [PlainText, Dropped, PlainText]
    assert (found[1].where, found[1].reason) == (f"{tmp_path / 'd.jsonl'}:2", reason)
    assert found[1].detail


def test_surrogate_pairs_are_one_character(tmp_path):
    assert one(tmp_path, '{"text": "\\ud83d\\ude00"}').text == "\U0001f600"


def test_bytes_that_are_not_utf8_drop_their_row(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "\xff"}\n{"text": "t"}\n')
    first, second = read_rows([str(path)])
    assert (first.reason, second.text) == ("bad_unicode", "t")


# Files


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_line_separators_inside_a_string_do_not_split_the_line(tmp_path, separator):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": f"a{separator}b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    (row,) = read_rows([str(path)])
    assert row.text == f"a{separator}b"


def test_bom_blank_lines_and_a_missing_last_newline_are_tolerated(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert [(row.text, row.where) for row in read_rows([str(path)])] == [
        ("a", f"{path}:1"),
        ("b", f"{path}:4"),
    ]


def test_array_lines_and_gzip_hold_the_same_rows(tmp_path):
    rows = [{"id": i, "text": f"t{i}"} for i in range(3)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "b.json").write_text(lines)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    paths = [str(p) for p in sorted(tmp_path.iterdir())]
    assert [row.text for row in read_rows(paths)] == ["t0", "t1", "t2"] * 4


def test_nulls_that_parquet_fills_in_are_not_seen(tmp_path):
    asks = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
    }
    rows = [{"messages": [U, asks]}, {"messages": [U, {**A, "name": "n"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    first, second = read_rows([str(tmp_path / "d.parquet")])
    assert set(first.turns[1].extra) == {"tool_calls"}
    assert second.turns[1].extra == {"name": "n"}


def test_empty_file_has_no_rows(tmp_path):
    (tmp_path / "d.jsonl").touch()
    assert list(read_rows([str(tmp_path / "d.jsonl")])) == []


def test_standard_input_is_read_as_lines():
    code = (
        "import sys; from specctl.core.conversations import read_rows\n"
        "print([(r.where, r.text) for r in read_rows(['-'])])\n"
        "print([m for m in ('torch', 'transformers', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], input=b'{"text": "a"}\n', capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == ["[('stdin:1', 'a')]", "[]"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "no such data file"),
        ("folder", "folder", "folder"),
        ("d.parquet", b"PAR1 not really", "cannot be read"),
        ("d.jsonl.gz", b"not gzip", "cannot be read"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-12], "cannot be read"),
        ("d.json", b"[1, 2", "no JSON array"),
    ],
)
def test_unusable_file_is_an_error_that_names_it(tmp_path, name, content, message):
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(read_rows([str(path)]))
    assert caught.value.where == str(path)


def test_missing_second_file_is_found_before_the_first_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "t"}\n')
    with pytest.raises(DataError, match="no such data file"):
        read_rows([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])


@pytest.mark.parametrize("paths", [[], ["-", "-"]])
def test_no_file_and_standard_input_twice_are_refused(paths):
    with pytest.raises(DataError):
        read_rows(paths)


def test_lines_are_read_one_at_a_time(tmp_path):
    """A later damaged line must not keep earlier rows from coming out."""
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n') + b"garbage after the first member")
    rows = read_rows([str(path)])
    assert next(rows).text == "a"
    with pytest.raises(DataError):
        next(rows)

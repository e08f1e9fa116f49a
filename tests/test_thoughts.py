"""Reasoning, calls and dates of chats: what the target wrote is supervised, and nothing that a template made of it."""

import json
from pathlib import Path
from typing import Any

import chat_templates as shapes
import pytest
import tokfix
from test_chat import answers, chat, run, supervised

from specctl.core.chat import tokenize
from specctl.core.conversations import read_rows
from specctl.core.generation import PromptEncoder
from specctl.core.thoughts import spoken
from specctl.errors import TargetError
from specctl.records.conversation import Conversation, Turn
from specctl.records.sample import Dropped

U, A = "user", "assistant"
IM = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
OPENS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{%- set r = m.reasoning_content or '' %}"
    "{{- '<|im_start|>assistant\n<think>\n' + r + '\n</think>\n\n' + m.content + '<|im_end|>\n' }}"
    "{%- else %}" + IM + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
"""A template whose prompt opens the thought, as Qwen3.5's."""
DATED = "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + tokfix.CHATML
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")


def rows(tmp_path: Path, *found: dict[str, Any]) -> list[Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return list(read_rows([str(path)]))


def cut(content: str, **extra: Any) -> Conversation:
    return Conversation([Turn(U, "q"), Turn(A, content, extra)], "data.jsonl:1", is_cut=True)


def test_an_empty_thought_whose_first_half_is_in_the_prompt_is_not_supervised() -> None:
    """NVIDIA-NeMo/Automodel#3738: the template's own `</think>` was learnt as if the target had written it."""
    assert answers(chat((U, "q"), (A, "a")), OPENS) == "a<|im_end|>"
    thought = chat((U, "q"), Turn(A, "a", {"reasoning_content": "so"}))
    assert answers(thought, OPENS) == "so\n</think>\n\na<|im_end|>"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_is_shown_whatever_the_row_and_the_template_call_it(key: str, read: str) -> None:
    """A template that reads `thinking` (gpt-oss) shows nothing of `reasoning_content`, and the other way round."""
    template = OPENS.replace("reasoning_content", read)
    assert answers(chat((U, "q"), Turn(A, "a", {key: "so"})), template) == "so\n</think>\n\na<|im_end|>"


@pytest.mark.parametrize(
    ("row", "template", "text"),
    [
        (cut("<think>\nso it go"), shapes.QWEN3, "<think>\nso it go"),
        (cut("", reasoning_content="so it go"), shapes.QWEN3, "<think>\nso it go"),
        (cut("<think>\nso it go"), OPENS, "so it go"),
        (cut("", reasoning_content="so it go"), OPENS, "so it go"),
        (cut("an answer that sto"), shapes.QWEN3, "an answer that sto"),
    ],
)
def test_an_answer_that_was_cut_in_its_thought_is_what_the_target_wrote(
    row: Conversation, template: str, text: str
) -> None:
    """Rendered as any answer it would get an empty thought before it, and an end."""
    tokenizer = tokfix.build(template)
    sample = run(row, template, tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == text
    assert tokenizer.decode(sample.input_ids).endswith(text)


def test_earlier_answers_of_a_chat_that_ends_in_a_cut_thought_stay_supervised() -> None:
    turns = [Turn(U, "q"), Turn(A, "first"), Turn(U, "r"), Turn(A, "<think>\nand no")]
    tokenizer = tokfix.build(shapes.QWEN3)
    sample = run(Conversation(turns, "x:1", is_cut=True), shapes.QWEN3, tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "first<|im_end|><think>\nand no"


def test_a_call_that_the_template_does_not_show_drops_the_row() -> None:
    """Plain ChatML shows no calls: the row would teach an answer of nothing."""
    row = chat((U, "q"), Turn(A, "", {"tool_calls": [CALL]}))
    dropped = run(row)
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, "`weather`" in dropped.detail) == ("tool_call_not_shown", True)
    assert "weather" in answers(row, shapes.CHATML_TOOLS)


def test_a_turn_of_weight_zero_is_read_and_not_supervised(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "bad", "weight": 0},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "good", "weight": 1},
    ]
    (row,) = rows(tmp_path, {"messages": turns})
    assert answers(row, tokfix.CHATML) == "good<|im_end|>"
    assert answers(row, shapes.CHATML_GENERATION).strip() == "good<|im_end|>"


@pytest.mark.parametrize(
    ("more", "is_cut"),
    [
        ({"truncated": "true"}, True),
        ({"truncated": "false"}, False),
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "stop"}, False),
        ({"finish_reasons": ["stop", "length"]}, True),
        ({"finish_reasons": ["length", "stop"]}, False),
    ],
)
def test_a_row_that_says_its_answer_was_cut_teaches_no_end(more: Any, is_cut: bool, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "an answ"}]
    (row,) = rows(tmp_path, {"messages": turns, **more})
    assert answers(row, tokfix.CHATML) == ("an answ" if is_cut else "an answ<|im_end|>")


def test_functions_of_openais_older_form_are_tools(tmp_path: Path) -> None:
    functions = [{"name": "weather", "parameters": {}}]
    (row,) = rows(tmp_path, {"messages": [{"role": "user", "content": "q"}], "functions": functions})
    assert row.tools == [{"type": "function", "function": functions[0]}]


def test_a_generation_block_without_the_closing_token_still_teaches_the_end() -> None:
    """huggingface/trl#5988."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert answers(chat((U, "q"), (A, "a")), template) == "a<|im_end|>"


def test_a_generation_tag_in_a_comment_is_no_tag() -> None:
    assert answers(chat((U, "q"), (A, "a")), "{# {% generation %} #}" + tokfix.CHATML) == "a<|im_end|>"


def test_a_template_that_writes_the_date_gives_the_same_sample_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is resumed on the next day would hold each row twice."""
    import transformers.utils.chat_template_utils as theirs

    tokenizer = tokfix.build(DATED)
    row = chat((U, "q"), (A, "a"))
    first = run(row, DATED, tokenizer=tokenizer).input_ids.tolist()

    class Tomorrow:
        """The day after, wherever transformers asks for it."""

        @staticmethod
        def now() -> Any:
            from datetime import datetime

            return datetime(2031, 5, 6)

    monkeypatch.setattr(theirs, "datetime", Tomorrow)
    assert run(row, DATED, tokenizer=tokenizer).input_ids.tolist() == first
    prompt = PromptEncoder(tokenizer, None).encode([{"role": "user", "content": "q"}], None, where="x:1")
    assert not isinstance(prompt, Dropped)
    assert list(prompt.ids) == first[: len(prompt.ids)]


def test_an_id_beyond_the_embedding_is_named() -> None:
    tokenizer = tokfix.build()
    row = chat((U, "q"), (A, "a"))
    highest = max(tokenize(row, tokenizer, template=tokfix.CHATML, max_length=64).input_ids)
    with pytest.raises(TargetError, match=f"the tokenizer gives id {highest} .* embedding ends at {highest - 1}"):
        tokenize(row, tokenizer, template=tokfix.CHATML, max_length=64, vocab_size=int(highest))
    with pytest.raises(TargetError, match="the tokenizer gives id"):
        PromptEncoder(tokenizer, None, int(highest)).encode([{"role": "user", "content": "q"}], None, where="x")


def test_a_template_that_fails_as_a_program_fails_drops_the_prompt() -> None:
    tokenizer = tokfix.build("{{ 1 / (messages | length - 1) }}")
    found = PromptEncoder(tokenizer, None).encode([{"role": "user", "content": "q"}], None, where="x:1")
    assert isinstance(found, Dropped)
    assert found.reason == "template_error"


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        ("hello<|im_end|>there", "hellothere", None),
        ("<think>\nso\n</think>\n\nfine", "<think>\nso\n</think>\n\nfine", None),
        (
            "<|channel|>analysis<|message|>user asks x<|end|><|start|>assistant<|channel|>final<|message|>Hello!",
            "Hello!",
            "user asks x",
        ),
        ("<|channel|>analysis<|message|>still thinki", "", "still thinki"),
    ],
)
def test_special_tokens_of_an_answer_are_its_thought_and_not_its_text(
    text: str, content: str, reasoning: str | None
) -> None:
    """Left out one by one they make `analysisuser asks xassistantfinalHello!` of an answer of gpt-oss."""
    tokenizer = tokfix.build(extra_special=(*HARMONY, "<think>", "</think>"))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert spoken(tokenizer, ids) == (content, reasoning)


DROPS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' }}"
    "{%- else %}" + IM + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
)
"""A template that opens the thought in the prompt and leaves it out of every answer, as DeepSeek-R1's."""


@pytest.mark.parametrize(
    "answer",
    [Turn(A, "<think>\nso\n</think>\n\nfine"), Turn(A, "fine", {"reasoning_content": "so"})],
)
def test_a_thought_left_out_of_the_last_answer_is_learnt_as_the_target_wrote_it(
    answer: Turn,
) -> None:
    """The target thinks before it answers; a draft that never saw a thought would be served nothing else."""
    tokenizer = tokfix.build(DROPS)
    sample = run(chat((U, "q"), answer), DROPS, tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "so\n</think>\n\nfine<|im_end|>"
    assert "<|im_start|>assistant\n<think>\nso\n" in tokenizer.decode(sample.input_ids)


def test_thoughts_of_earlier_answers_stay_out_as_the_target_reads_them() -> None:
    turns = [Turn(U, "q"), Turn(A, "<think>\na\n</think>\n\nb"), Turn(U, "r"), Turn(A, "<think>\nc\n</think>\n\nd")]
    tokenizer = tokfix.build(DROPS)
    sample = run(chat(*turns), DROPS, tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "\n\nb<|im_end|>c\n</think>\n\nd<|im_end|>"


def test_reasoning_that_no_thought_can_hold_drops_the_row() -> None:
    dropped = run(chat((U, "q"), Turn(A, "fine", {"reasoning_content": "so it goes"})))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "reasoning_not_shown"

"""Rows through templates and tokenizers: what is supervised, kept and dropped.

One file past 300 lines: nearly every test is one row through `run`, and reads beside its neighbours.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import chat_templates as shapes
import numpy as np
import pytest
import tokfix
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.core.chat import effective_template, samples, template_hash, tokenize, tokenizer_hash
from specctl.core.conversations import read_rows
from specctl.errors import NotSupportedError, TargetError
from specctl.records.conversation import Conversation, PlainText, Tokenized, Turn
from specctl.records.sample import Dropped, Sample

U, A = "user", "assistant"


def chat(*turns: tuple[str, str] | Turn, tools: Any = None) -> Conversation:
    return Conversation([t if isinstance(t, Turn) else Turn(*t) for t in turns], "data.jsonl:1", tools=tools)


def run(row: Any, template: str | None = tokfix.CHATML, *, tokenizer: Any = None, max_length: int = 4096) -> Any:
    return tokenize(row, tokenizer or tokfix.build(template), template=template, max_length=max_length)


def supervised(sample: Sample, tokenizer: Any) -> str:
    return tokenizer.decode(sample.input_ids[sample.loss_mask == 1])


def answers(row: Conversation, template: str, special: tuple[str, ...] = (), eos: str = "<|im_end|>") -> str:
    tokenizer = tokfix.build(template, extra_special=special, eos=eos)
    return supervised(run(row, template, tokenizer=tokenizer), tokenizer)


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


TWO_ROUNDS = ((U, "a"), (A, "b"), (U, "c"), (A, "d"))


# Masks by render boundary


def test_template_without_generation_tags_supervises_the_answer_and_its_closing_token():
    """Stock templates have no tags; transformers then gives an all-zero mask and trains on nothing."""
    tokenizer = tokfix.build()
    sample = run(chat((U, "hi"), (A, "yo")), tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "yo<|im_end|>"
    assert sample.loss_mask.sum() == 3
    assert len(sample.input_ids) == 1 + 25  # the tokenizer's BOS, and what the template writes


def test_generation_tags_and_render_boundaries_agree():
    row = chat(("system", "s"), *TWO_ROUNDS)
    by_tag, by_boundary = run(row, shapes.CHATML_GENERATION), run(row)
    assert by_tag.input_ids.tolist() == by_boundary.input_ids.tolist()
    assert by_tag.loss_mask.tolist() == by_boundary.loss_mask.tolist()


def test_answer_that_is_the_first_token_does_not_spread_over_what_follows():
    """huggingface/transformers#47326: a span ending at token 0 supervised the rest of the text."""
    tokenizer = tokfix.build(shapes.ANSWER_FIRST, has_bos=False)
    sample = run(chat((U, "SECRET"), (A, "x")), shapes.ANSWER_FIRST, tokenizer=tokenizer)
    assert sample.loss_mask.tolist() == [1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_blanks_are_supervised_in_the_answer_and_not_before_it(trim_offsets):
    """Byte-level tokenizers may trim a blank token's offsets to nothing (huggingface/transformers#47326)."""
    template = tokfix.CHATML.replace("assistant\n", "assistant ").replace("m['role'] + '\n'", "m['role'] + ' '")
    tokenizer = tokfix.build(template, trim_offsets=trim_offsets, merges=(("Ġ", "Ġ"), ("Ġ", "y")))
    sample = run(chat((U, "hi"), (A, "a  b \n yo")), template, tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "a  b \n yo<|im_end|>"


def test_mask_of_a_template_that_hides_answers_is_never_all_zero():
    dropped = run(chat((U, "hi"), (A, "yo")), shapes.HIDDEN)
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "no_assistant_span"


def test_hidden_earlier_answers_leave_the_shown_one_supervised():
    assert answers(chat(*TWO_ROUNDS), shapes.LAST_ROUND) == "d<|im_end|>"


# Shapes of public templates


def test_llama3_like_template():
    assert (
        answers(chat(("system", "s"), *TWO_ROUNDS), shapes.LLAMA3, shapes.LLAMA3_SPECIAL, "<|eot_id|>")
        == "b<|eot_id|>d<|eot_id|>"
    )


def test_gemma_like_template_strips_content_and_names_the_role_model():
    row = chat((U, " a "), (A, "  b\n"), (U, "c"), (A, "d \n"))
    assert answers(row, shapes.GEMMA, shapes.GEMMA_SPECIAL, "</s>") == "b<end_of_turn>d<end_of_turn>"


def test_mistral_like_template_has_no_generation_prompt():
    assert answers(chat(*TWO_ROUNDS), shapes.MISTRAL, shapes.MISTRAL_SPECIAL, "</s>") == " b</s> d</s>"


def test_glm_like_template_closes_an_answer_with_the_next_role():
    assert answers(chat(*TWO_ROUNDS), shapes.GLM, shapes.GLM_SPECIAL, "<|user|>") == "b<|user|>d"


def test_qwen3_like_template_supervises_no_thought_that_only_the_template_wrote():
    assert answers(chat(*TWO_ROUNDS), shapes.QWEN3) == "b<|im_end|>d<|im_end|>"


def test_qwen3_like_template_strips_earlier_thoughts_and_supervises_the_last():
    row = chat((U, "a"), (A, "<think>\nr1\n</think>\n\nb"), (U, "c"), (A, "<think>\nr2\n</think>\n\nd"))
    assert answers(row, shapes.QWEN3) == "b<|im_end|><think>\nr2\n</think>\n\nd<|im_end|>"


def test_qwen3_like_template_with_reasoning_beside_the_content():
    first, last = Turn(A, "b", {"reasoning_content": "r1"}), Turn(A, "d", {"reasoning_content": "r2"})
    row = chat((U, "a"), first, (U, "c"), last)
    assert answers(row, shapes.QWEN3) == "b<|im_end|><think>\nr2\n</think>\n\nd<|im_end|>"


def test_qwen3_like_template_with_tool_calls_in_rewritten_history():
    asks = Turn(A, "", {"reasoning_content": "r", "tool_calls": [call("f", {"x": 1})]})
    row = chat((U, "a"), asks, ("tool", "42"), (A, "b"), (U, "c"), (A, "d"))
    tool_call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert answers(row, shapes.QWEN3) == f"{tool_call}<|im_end|>b<|im_end|>d<|im_end|>"


def test_deepseek_like_template_is_prompted_with_a_thought_that_history_does_not_show():
    row = chat((U, "a"), (A, "<think>r</think>b"), (U, "c"), (A, "d"))
    text = answers(row, shapes.DEEPSEEK, shapes.DEEPSEEK_SPECIAL, "<|end_of_sentence|>")
    assert text == "b<|end_of_sentence|>d<|end_of_sentence|>"


def test_deepseek_like_tool_call_with_special_tokens_inside_is_supervised_whole():
    row = chat((U, "a"), Turn(A, "", {"tool_calls": [call("f", {})]}), ("tool", "42"), (A, "d"))
    text = answers(row, shapes.DEEPSEEK, shapes.DEEPSEEK_SPECIAL, "<|end_of_sentence|>")
    assert text == "<|call_begin|>f{}<|call_end|><|end_of_sentence|>d<|end_of_sentence|>"


def test_answer_that_repeats_the_question_is_still_the_only_one_supervised():
    row = chat((U, "same"), (A, "same"), (U, "same"), (A, "same"))
    tokenizer = tokfix.build(shapes.QWEN3)
    sample = run(row, shapes.QWEN3, tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "same<|im_end|>" * 2
    last = len(sample.input_ids) - 2  # a newline of the template follows the last closing token
    assert sample.loss_mask[last - 4 : last + 1].all()


@pytest.mark.parametrize("template", [tokfix.CHATML, shapes.QWEN3])
def test_question_that_imitates_an_answer_is_unsupervised(template):
    fake = "x<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>"
    assert answers(chat((U, fake), (A, "b"), (U, fake), (A, "d")), template) == "b<|im_end|>d<|im_end|>"


def test_answer_that_the_template_shortens_in_history_is_found_by_probes():
    template = tokfix.CHATML.replace("m['content']", "(m['content'] if loop.last else m['content'].split('|')[0])")
    assert answers(chat((U, "a"), (A, "b|x"), (U, "c"), (A, "d|y")), template) == "b<|im_end|>d|y<|im_end|>"


def test_answer_that_the_template_rewrites_is_found_by_probes():
    template = tokfix.CHATML.replace("m['content']", "m['content'] | upper")
    assert answers(chat((U, "a"), (A, "yes"), (U, "c"), (A, "no")), template) == "YES<|im_end|>NO<|im_end|>"


def test_tool_call_that_cannot_be_located_drops_the_row():
    template = shapes.DEEPSEEK.replace("'<|Assistant|><think>\\n'", "'<|begin|>'")
    row = chat((U, "a"), Turn(A, "", {"tool_calls": [call("f", {})]}), ("tool", "42"), (A, "d"))
    tokenizer = tokfix.build(template, extra_special=shapes.DEEPSEEK_SPECIAL, eos="<|end_of_sentence|>")
    assert run(row, template, tokenizer=tokenizer).reason == "no_assistant_span"


def test_answer_that_holds_a_closing_token_is_supervised_whole():
    row = chat((U, "a"), (A, "b<|im_end|>c"), (U, "a"), (A, "d"))
    assert answers(row, tokfix.CHATML) == "b<|im_end|>c<|im_end|>d<|im_end|>"


# Tools


def test_tool_results_are_unsupervised_and_tool_calls_supervised():
    asks = Turn(A, "", {"tool_calls": [call("f", {"x": 1})]})
    row = chat((U, "q"), asks, ("tool", "42"), (A, "b"), tools=[{"name": "f"}])
    tool_call = '\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert answers(row, shapes.CHATML_TOOLS) == f"{tool_call}<|im_end|>b<|im_end|>"


def test_tools_and_arguments_give_equal_tokens_as_objects_and_as_strings(tmp_path):
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [
        {"role": U, "content": "q"},
        None,
        {"role": "tool", "content": "42"},
        {"role": A, "content": "b"},
    ]
    rows = []
    for given_tools, arguments in ((tools, {"x": 1}), (json.dumps(tools), '{"x": 1}')):
        turns[1] = {"role": A, "content": None, "tool_calls": [call("f", arguments)]}
        rows.append({"messages": list(turns), "tools": given_tools})
    path = write(tmp_path / "d.jsonl", *rows)
    tokenizer = tokfix.build(shapes.CHATML_TOOLS)
    first, second = samples([path], tokenizer, template=shapes.CHATML_TOOLS, max_length=999)
    assert isinstance(first, Sample) and isinstance(second, Sample)
    assert first.sample_id == second.sample_id
    assert '"name": "f"' in tokenizer.decode(first.input_ids)


def test_rows_without_tools_are_all_kept(tmp_path):
    """Batches with `tools=[[]]` once kept only their first row."""
    row = {"messages": [{"role": U, "content": "q"}, {"role": A, "content": "b"}], "tools": []}
    path = write(tmp_path / "d.jsonl", row, row, row)
    found = list(samples([path], tokfix.build(), template=shapes.CHATML_TOOLS, max_length=99))
    assert [type(sample) for sample in found] == [Sample] * 3


def test_malformed_tool_arguments_drop_their_row_only(tmp_path):
    bad = [{"role": U, "content": "q"}, {"role": A, "tool_calls": [call("f", "{bad")]}]
    good = [{"role": U, "content": "q"}, {"role": A, "content": "b"}]
    path = write(tmp_path / "d.jsonl", {"messages": bad}, {"messages": good})
    first, second = samples([path], tokfix.build(), template=tokfix.CHATML, max_length=99)
    assert isinstance(first, Dropped) and first.reason == "bad_tool_arguments"
    assert isinstance(second, Sample)


# Length, BOS, truncation


def test_chat_of_26_tokens_passes_as_26_tokens():
    """transformers 5 returns a BatchEncoding, whose len() is 2: every chat once looked too short."""
    template = "{{ bos_token }}" + tokfix.CHATML
    assert len(run(chat((U, "hi"), (A, "yo")), template).input_ids) == 26


def test_bos_that_the_template_writes_is_the_only_one():
    template = "{{ bos_token }}" + tokfix.CHATML
    ids = run(chat((U, "hi"), (A, "yo")), template).input_ids.tolist()
    assert ids[:2] == [tokfix.BOS, tokfix.IM_START]
    assert ids.count(tokfix.BOS) == 1
    assert ids.count(tokfix.IM_END) == 2


def test_template_without_bos_keeps_the_one_of_the_tokenizer():
    ids = run(chat((U, "hi"), (A, "yo"))).input_ids.tolist()
    assert ids[:2] == [tokfix.BOS, tokfix.IM_START]
    assert ids.count(tokfix.BOS) == 1


def test_bos_leaves_the_mask_on_the_same_tokens():
    row = chat((U, "hi"), (A, "yo"))
    with_bos, without = run(row), run(row, tokenizer=tokfix.build(has_bos=False))
    assert with_bos.loss_mask.tolist() == [0, *without.loss_mask.tolist()]


@pytest.mark.parametrize("text", ["plain text", "<s>plain text"])
def test_plain_text_is_supervised_with_one_bos_and_needs_no_template(text):
    sample = run(PlainText(text, "t.jsonl:1"), None)
    assert sample.input_ids.tolist() == [tokfix.BOS, *b"plain text"]
    assert sample.loss_mask.all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_cuts_ids_and_mask_on_the_same_side(side):
    tokenizer = tokfix.build(truncation_side=side)
    row = chat((U, "q"), (A, "h\u00e9llo"), (U, "r"), (A, "ok"))
    whole = run(row, tokenizer=tokenizer)
    cut = run(row, tokenizer=tokenizer, max_length=40)
    kept = slice(-40, None) if side == "left" else slice(40)
    assert cut.is_truncated and not whole.is_truncated
    assert cut.input_ids.tolist() == whole.input_ids[kept].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[kept].tolist()


def test_answer_behind_the_cut_is_truncated_away():
    assert run(chat((U, "hi"), (A, "yo")), max_length=8).reason == "truncated_away"


def test_single_token_is_too_short():
    assert run(Tokenized([5], [1], "x:1"), None).reason == "too_short"


def test_answer_to_a_multi_byte_chat_is_exact():
    """Offsets in bytes or tokens would drift behind the first multi-byte character."""
    first = "h\u00e9llo \U0001f44b\U0001f3fd \u65e5\u672c"
    tokenizer = tokfix.build()
    sample = run(chat((U, "a"), (A, first), (U, "b"), (A, "ok")), tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == f"{first}<|im_end|>ok<|im_end|>"
    assert (sample.loss_mask.sum(), len(sample.input_ids)) == (26, 1 + 68)


# Rows that give nothing


def reasons(path: str, template: str | None = tokfix.CHATML) -> list[str]:
    found = samples([path], tokfix.build(template), template=template, max_length=999)
    return [row.reason if isinstance(row, Dropped) else "kept" for row in found]


def test_useless_chats_are_dropped_with_reasons_of_their_own(tmp_path):
    turns = (
        [],
        [(A, "x")],
        [(U, "q")],
        [(U, ""), (A, "")],
        [(U, "q"), (A, ""), (U, "q2"), (A, "b")],
    )
    rows = [{"messages": [{"role": r, "content": c} for r, c in turn]} for turn in turns]
    found = reasons(write(tmp_path / "d.jsonl", *rows))
    assert found == ["empty", "starts_with_assistant", "no_assistant", "empty_answer", "kept"]


def test_empty_answer_beside_a_full_one_keeps_its_closing_token():
    row = chat((U, "q"), (A, ""), (U, "q2"), (A, "b"))
    assert answers(row, tokfix.CHATML) == "<|im_end|>b<|im_end|>"


def test_chat_that_goes_on_after_its_last_answer_is_kept_whole():
    tokenizer = tokfix.build()
    sample = run(chat((U, "a"), (A, "b"), (U, "tail")), tokenizer=tokenizer)
    assert supervised(sample, tokenizer) == "b<|im_end|>"
    assert tokenizer.decode(sample.input_ids).endswith("tail<|im_end|>\n")


def test_chat_that_the_template_rejects_is_dropped_with_its_line(tmp_path):
    good = {"messages": [{"role": U, "content": "a"}, {"role": A, "content": "b"}]}
    bad = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": U, "content": "a"},
            {"role": A, "content": "b"},
        ]
    }
    path = write(tmp_path / "d.jsonl", good, bad, good)
    found = list(samples([path], tokfix.build(), template=shapes.GEMMA, max_length=99))
    assert [type(row) for row in found] == [Sample, Dropped, Sample]
    assert (found[1].where, found[1].reason) == (f"{path}:2", "template_error")
    assert "System role not supported" in found[1].detail


def test_template_that_fails_as_python_fails_drops_the_row():
    assert run(chat((U, "a"), (A, "b")), "{{ messages[0]['content'] + none }}").reason == "template_error"


def test_mistral_order_of_roles_drops_the_row_that_breaks_it():
    assert run(chat((U, "a"), (A, "b"), (A, "c")), shapes.MISTRAL).reason == "template_error"


def test_chat_without_any_template_says_what_to_pass():
    with pytest.raises(TargetError, match="no chat_template") as caught:
        run(chat((U, "a"), (A, "b")), None)
    assert "--chat-template" in caught.value.hint


def test_tokenised_rows_need_no_template(tmp_path):
    path = write(tmp_path / "d.jsonl", {"id": 7, "input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]})
    (sample,) = samples([path], tokfix.build(None), template=None, max_length=99)
    assert (sample.sample_id, sample.input_ids.tolist(), sample.loss_mask.tolist()) == (
        "7",
        [1, 2, 3],
        [0, 1, 1],
    )
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)


def test_tokenised_row_with_an_id_outside_the_vocabulary_is_dropped():
    row = Tokenized([1, 263], [1, 1], "x:1")
    assert tokenize(row, tokfix.build(), template=None, max_length=9, vocab_size=263).reason == "id_out_of_range"
    assert isinstance(tokenize(row, tokfix.build(), template=None, max_length=9, vocab_size=264), Sample)


def test_tokenised_row_without_supervised_tokens_is_dropped():
    assert run(Tokenized([1, 2], [0, 0], "x:1"), None).reason == "nothing_supervised"


def test_sharegpt_and_messages_give_identical_tokens(tmp_path):
    turns = (("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"))
    names = {"human": U, "gpt": A, "system": "system"}
    share = {"conversations": [{"from": r, "value": c} for r, c in turns]}
    messages = {"messages": [{"role": names[r], "content": c} for r, c in turns]}
    tokenizer = tokfix.build()
    path = write(tmp_path / "d.jsonl", share, messages)
    first, second = samples([path], tokenizer, template=tokfix.CHATML, max_length=999)
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert supervised(first, tokenizer) == supervised(second, tokenizer) == "b<|im_end|>d<|im_end|>"


def test_every_row_comes_out_once(tmp_path):
    good = {"messages": [{"role": U, "content": "a"}, {"role": A, "content": "b"}]}
    path = tmp_path / "d.jsonl"
    write(path, good, {"messages": []}, {"other": 1}, good, {"text": "t"})
    path.write_bytes(path.read_bytes() + b"{broken\n" + rb'{"text": "\ud83d"}' + b"\n")
    counts = Counter(reasons(str(path)))
    assert counts == {"kept": 3, "empty": 1, "unknown_row": 1, "bad_json": 1, "bad_unicode": 1}


def test_tokenizer_without_offsets_is_refused_by_name():
    from transformers import PreTrainedTokenizer

    class Words(PreTrainedTokenizer):
        @property
        def vocab_size(self) -> int:
            return 1

        def get_vocab(self) -> dict[str, int]:
            return {"w": 0}

        def _tokenize(self, text: str) -> list[str]:
            return ["w" for _ in text.split()]

        def _convert_token_to_id(self, token: str) -> int:
            return 0

    with pytest.raises(NotSupportedError, match="Words"):
        run(chat((U, "a"), (A, "b")), tokenizer=Words())


# Templates and hashes


def test_changed_template_text_changes_the_hash_and_a_touched_file_does_not(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(tokfix.CHATML)
    first = template_hash(effective_template(tokfix.build(None), str(path)))
    os.utime(path, (1, 1))
    assert template_hash(effective_template(tokfix.build(None), str(path))) == first
    path.write_text(tokfix.CHATML + " ")
    assert template_hash(effective_template(tokfix.build(None), str(path))) != first
    assert template_hash(None) != template_hash("none")


def test_override_wins_over_the_tokenizers_own_template():
    tokenizer = tokfix.build("own {{ messages }}")
    assert effective_template(tokenizer, None) == "own {{ messages }}"
    assert effective_template(tokenizer, "other {{ messages }}") == "other {{ messages }}"
    assert effective_template(tokfix.build(None), None) is None


def test_one_of_several_templates_is_chosen_by_name():
    tokenizer = tokfix.build(None)
    tokenizer.chat_template = {"default": "d {{ messages }}", "rag": "r {{ messages }}"}
    assert effective_template(tokenizer, None) == "d {{ messages }}"
    assert effective_template(tokenizer, "rag") == "r {{ messages }}"
    tokenizer.chat_template = {"rag": "r"}
    with pytest.raises(TargetError, match="none is called `default`"):
        effective_template(tokenizer, None)


def test_template_that_is_no_jinja_is_refused_before_any_row():
    with pytest.raises(TargetError, match="no Jinja template"):
        effective_template(tokfix.build(None), "{% for m in messages %}")


def test_missing_template_file_is_refused(tmp_path):
    with pytest.raises(TargetError, match="cannot be read"):
        effective_template(tokfix.build(None), str(tmp_path / "none.jinja"))


def test_tokenizer_hash_follows_the_rules_and_not_the_last_call():
    tokenizer = tokfix.build()
    first = tokenizer_hash(tokenizer)
    tokenizer("some text", truncation=True, max_length=3)
    assert tokenizer_hash(tokenizer) == first
    assert tokenizer_hash(tokfix.build(extra_special=("<new>",))) != first
    assert tokenizer_hash(tokfix.build(has_bos=False)) != first
    assert tokenizer_hash(tokfix.build(eos="</s>")) != first


def test_samples_without_an_id_are_named_by_their_content():
    first, second = (run(chat((U, "a"), (A, text))) for text in ("b", "c"))
    assert first.sample_id == run(chat((U, "a"), (A, "b"))).sample_id != second.sample_id


TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda text: "<" not in text and text.strip()
)
TOKENIZER = tokfix.build()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.sampled_from(["CHATML", "QWEN3", "GEMMA"]))
def test_supervised_text_is_the_stripped_answers_and_their_closing_tokens(rounds, shape):
    template = tokfix.CHATML if shape == "CHATML" else getattr(shapes, shape)
    closing = "<end_of_turn>" if shape == "GEMMA" else "<|im_end|>"
    tokenizer = TOKENIZER if shape != "GEMMA" else GEMMA_TOKENIZER
    row = chat(*[turn for q, a in rounds for turn in ((U, q.strip()), (A, a.strip()))])
    sample = tokenize(row, tokenizer, template=template, max_length=4096)
    assert supervised(sample, tokenizer) == "".join(a.strip() + closing for _, a in rounds)


GEMMA_TOKENIZER = tokfix.build(extra_special=shapes.GEMMA_SPECIAL, eos="</s>")


def test_rows_and_their_samples_are_the_same_rows(tmp_path):
    path = write(tmp_path / "d.jsonl", {"id": "x", "prompt": "q", "response": "r"}, {"id": "y", "text": "t"})
    ids = [row.row_id for row in read_rows([path])]
    assert [s.sample_id for s in samples([path], TOKENIZER, template=tokfix.CHATML, max_length=99)] == ids


def test_a_cut_answer_teaches_no_end_of_turn() -> None:
    """Otherwise a draft learns to stop where only a token limit did (vllm-project/speculators#835)."""
    tokenizer = tokfix.build()
    turns = (Turn("user", "hi"), Turn("assistant", "and then we"))
    cut = run(Conversation(turns, "x:1", is_cut=True))
    assert supervised(cut, tokenizer) == "and then we"
    assert cut.input_ids[-1] == ord("e")


def test_a_regenerated_row_marked_truncated_is_read_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "and then"}]
    path.write_text(json.dumps({"messages": turns, "truncated": True}) + "\n")
    (row,) = read_rows([str(path)])
    assert isinstance(row, Conversation)
    assert row.is_cut

"""Reasoning and calls of an answer: under the name that a template reads, cut halfway, or not shown at all."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from specctl.core.masks import REASONING, Span, Template, assistant_spans, opened_prompt, opens_thought
from specctl.records.conversation import Conversation

KEPT = ("think", "tool", "reason")
"""Special tokens with such a word in them are part of what an answer says."""
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|\Z)", re.DOTALL
)


def spoken(tokenizer: Any, ids: Sequence[int]) -> tuple[str, str | None]:
    """What the token ids of an answer say, and its reasoning where the model writes channels (gpt-oss).

    Other special tokens are left out, but for those that begin and end a thought or a call.
    """
    special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    if "<|channel|>" in {special.get(index) for index in ids}:
        return _of_channels(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    kept = [i for i in ids if i not in special or any(word in special[i].lower() for word in KEPT)]
    return tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False), None


def _of_channels(text: str) -> tuple[str, str | None]:
    parts = _CHANNEL.findall(text)
    said = [part for name, part in parts if name == "final"]
    thought = [part for name, part in parts if name != "final"]
    return "".join(said), "".join(thought) or None


def with_reasoning(message: Mapping[str, Any], template: str) -> dict[str, Any]:
    """The message with its reasoning under each name that the template reads: data sets and templates call it
    `reasoning_content`, `reasoning` or `thinking`, and a template shows nothing of what it does not know.
    """
    said = _reasoning(message)
    if said is None:
        return dict(message)
    known = {key: said for key in REASONING if re.search(rf"\b{key}\b", template)}
    return {**known, **message}


def _reasoning(message: Mapping[str, Any]) -> Any:
    """The reasoning beside the text of a message, by whatever name; None where there is none."""
    return next((message[key] for key in REASONING if message.get(key)), None)


def is_cut_in_thought(message: Mapping[str, Any]) -> bool:
    """Whether a cut answer ends before its thought does."""
    content, thought = str(message["content"]), _reasoning(message)
    return ("<think>" in content and "</think>" not in content) or (thought is not None and not content.strip())


def cut_thought(
    row: Conversation, messages: Sequence[Mapping[str, Any]], template: Template
) -> tuple[str, list[Span]] | None:
    """The render of a chat whose last answer was cut while it thought: what the target read, and what it wrote.

    A template closes every thought, and would put an empty one before it. None where nothing tells how a thought
    begins.
    """
    prompt = opened_prompt(template, messages[:-1], tools=row.tools)
    text = str(messages[-1]["content"]).lstrip()
    thought = _reasoning(messages[-1])
    if thought is not None and not text:
        if not opens_thought(prompt) and "<think>" not in template.text:
            return None
        text = f"<think>\n{thought}"
    return _after(prompt, text, row, messages, template)


def hides_thought(messages: Sequence[Mapping[str, Any]], text: str) -> bool:
    """Whether the last message is an answer whose thought the render does not hold.

    Templates leave out the thoughts of earlier answers, as the target reads them; of the last one some do too, and
    what the target writes first would not be learnt (sgl-project/SpecForge#296, #419).
    """
    thought = _thought_of(messages[-1]) if messages[-1]["role"] == "assistant" else ""
    return bool(thought) and thought not in text


def shown_thought(
    row: Conversation, messages: Sequence[Mapping[str, Any]], template: Template, closing: str
) -> tuple[str, list[Span]] | None:
    """The chat with its last answer as the target wrote it, thought and all, after what it read, and `closing`.

    None where nothing tells how the thought was written.
    """
    said, thought = str(messages[-1]["content"]), _thought_of(messages[-1])
    prompt = opened_prompt(template, messages[:-1], tools=row.tools)
    if "</think>" not in said:
        if not opens_thought(prompt) and "<think>" not in template.text:
            return None
        said = f"<think>\n{thought}\n</think>\n\n{said.strip()}"
    return _after(prompt, said.strip() + closing, row, messages, template)


def _thought_of(message: Mapping[str, Any]) -> str:
    said = _reasoning(message)
    if said is None:
        before, end, _ = str(message["content"]).rpartition("</think>")
        said = before.rpartition("<think>")[2] if end else ""
    return str(said).strip()


def _after(
    prompt: str, text: str, row: Conversation, messages: Sequence[Mapping[str, Any]], template: Template
) -> tuple[str, list[Span]]:
    """`prompt` and what the target wrote after it; spans of earlier answers where they read as they did."""
    if opens_thought(prompt):
        text = text.removeprefix("<think>").lstrip("\n")
    before, spans = assistant_spans(template, messages[:-1], tools=row.tools)
    kept = spans if prompt.startswith(before.rstrip()) else []
    return prompt + text, [*kept, (len(prompt), len(prompt) + len(text))]


def hidden_call(messages: Sequence[Mapping[str, Any]], text: str) -> str | None:
    """The name of a call that the render does not hold: an answer of nothing would be learnt in its place."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or call).get("name")
            if isinstance(name, str) and name not in text:
                return name
    return None


def without_end(text: str, spans: Sequence[Span], answer: str) -> tuple[str, list[Span]]:
    """The render up to the last word of a cut answer: the target never said that it ended there.

    Source: vllm-project/speculators#835.
    """
    begin, end = spans[-1]
    found = text.rfind(answer, begin, end)
    stop = found + len(answer) if found >= 0 and answer else begin
    return text[:stop], [*spans[:-1], (begin, stop)]

"""Where, in a rendered chat, the assistant's own text lies.

Knows chat templates and characters; knows no tokens. Supervised is what the model writes at inference:
the answer (with its reasoning and tool calls) and the closing token after it, not the role header and
not what the generation prompt already holds. Three ways, the first that applies to a turn:

1. the template's own `{% generation %}` blocks, with the closing token that follows;
2. render boundaries: the chat up to the turn, with the generation prompt, is a prefix of the whole;
3. probes, for templates that rewrite history (Qwen3 and DeepSeek drop earlier reasoning): the turn's
   content is replaced twice, and what stays equal in both renders is not the content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specctl.core.templates import TEMPLATE_ERRORS, on_fixed_day
from specctl.errors import TargetError

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

PROBES: Final = ("q0j", "x1w")  # no two characters in common: not even one edge is shared
REASONING: Final = ("reasoning_content", "reasoning", "thinking")

_BLANK: Final = re.compile(r"\s*")
_EMPTY_THOUGHT: Final = re.compile(r"<think>\s*</think>\s*")
_CLOSED_THOUGHT: Final = re.compile(r"\s*</think>\s*")
_OPEN_THOUGHT: Final = re.compile(r"<think>\s*\Z")
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnlocatedError(TargetError):
    """An answer is in the rendered chat, and no way of finding it applies."""


class RenderError(TargetError):
    """The template refuses this chat."""


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template with the special tokens that it may write.

    `special_tokens` are the template's variables (`bos_token`); `closings` the texts that may end an
    answer, every special token but BOS.
    """

    text: str
    special_tokens: Mapping[str, Any]
    closings: tuple[str, ...]

    @property
    def has_generation(self) -> bool:
        """Whether the template marks the assistant's text itself."""
        return _GENERATION.search(self.text) is not None


@dataclass(frozen=True, slots=True)
class _Chat:
    """One conversation and its whole render."""

    template: Template
    messages: Messages
    tools: Sequence[Mapping[str, Any]] | None
    text: str

    def prefix(self, count: int, *, add_generation_prompt: bool) -> str:
        messages = self.messages[:count]
        return _render(self.template, messages, self.tools, add_generation_prompt=add_generation_prompt)[0]

    def probed(self, index: int, content: str) -> str:
        turn = {**self.messages[index], "content": content}
        messages = [*self.messages[:index], turn, *self.messages[index + 1 :]]
        return _render(self.template, messages, self.tools)[0]


def assistant_spans(
    template: Template, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[str, list[Span]]:
    """The rendered chat, and the character spans [start, end) in it that the assistant wrote, in order.

    An answer that the template leaves out has no span. Raises RenderError when the template refuses
    the chat, UnlocatedError when an answer is there and cannot be located.
    Source: huggingface/transformers#47326, vllm-project/speculators#227.
    """
    text, spans = _render(template, messages, tools)
    chat = _Chat(template, messages, tools, text)
    is_weighted = any(message.get("weight") == 0 for message in messages)
    if spans and not is_weighted:
        # A block that ends before the closing token would never teach the end (huggingface/trl#5988).
        is_whole = [text[start:end].rstrip().endswith(template.closings) for start, end in spans]
        spans = [(a, b if whole else _closed(chat, b)) for (a, b), whole in zip(spans, is_whole, strict=True)]
    else:
        found = [(i, _turn_span(chat, i)) for i, message in enumerate(messages) if message["role"] == "assistant"]
        _check_spans([span for _, span in found if span is not None], len(text))
        spans = [span for i, span in found if span is not None and messages[i].get("weight") != 0]
    _check_spans(spans, len(text))
    return text, [span for span in spans if span[0] < span[1]]


def opened_prompt(template: Template, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """What the target reads before it answers the last of `messages`. Raises RenderError."""
    return _render(template, messages, tools, add_generation_prompt=True)[0]


def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends in a thought that the template opened."""
    return _OPEN_THOUGHT.search(prompt) is not None


def _render(
    template: Template,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    add_generation_prompt: bool = False,
) -> tuple[str, list[Span]]:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=on_fixed_day(template.text),
            return_assistant_tokens_mask=template.has_generation,
            add_generation_prompt=add_generation_prompt,
            **template.special_tokens,
        )
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        raise RenderError(f"the chat template refuses the chat: {str(error) or type(error).__name__}") from error
    return texts[0], list(spans[0]) if spans else []


def _check_spans(spans: Sequence[Span], length: int) -> None:
    ends = [0, *(edge for span in spans for edge in span), length]
    if ends != sorted(ends):
        raise UnlocatedError("the answers that were found overlap or run backwards")


def _turn_span(chat: _Chat, index: int) -> Span | None:
    span = _boundary_span(chat, index)
    if span is not None and _shows(chat.text[span[0] : span[1]], chat.messages[index]):
        return span
    return _probed_span(chat, index)


def _shows(answer: str, message: Mapping[str, Any]) -> bool:
    """Whether `answer` holds the message's text, its reasoning aside."""
    return _without_thought(message) in answer


def _boundary_span(chat: _Chat, index: int) -> Span | None:
    start = _answer_start(chat, index)
    if start is None:
        return None
    start = _after_empty_thought(chat, index, start)
    end = _plain_end(chat, index, start)
    if end is None:
        end = _rendered_end(chat, index)
    return None if end is None else (start, max(start, end))


def _answer_start(chat: _Chat, index: int) -> int | None:
    prompt = chat.prefix(index, add_generation_prompt=True)
    if chat.text.startswith(prompt):
        return len(prompt)
    # Reasoning models are prompted with an opened thought, which past answers do not show.
    prompt = _OPEN_THOUGHT.sub("", prompt)
    return len(prompt) if chat.text.startswith(prompt) else None


def _after_empty_thought(chat: _Chat, index: int, start: int) -> int:
    """Behind the empty thought that Qwen3's template writes into an answer without reasoning, also where the prompt
    holds the first half of it (NVIDIA-NeMo/Automodel#3738).
    """
    message = chat.messages[index]
    if _has_reasoning(message) or message["content"].lstrip().startswith("<think>"):
        return start
    is_open = _OPEN_THOUGHT.search(chat.text, 0, start) is not None
    thought = (_CLOSED_THOUGHT if is_open else _EMPTY_THOUGHT).match(chat.text, start)
    return thought.end() if thought else start


def _has_reasoning(message: Mapping[str, Any]) -> bool:
    return any(message.get(key) for key in REASONING)


def _plain_end(chat: _Chat, index: int, start: int) -> int | None:
    """The end of an answer that is its content (as it is, stripped, or without its thought) and a
    closing token; spares a render."""
    message = chat.messages[index]
    if message.get("tool_calls"):
        return None
    for content in (message["content"], message["content"].strip(), _without_thought(message)):
        if chat.text.startswith(content, start):
            end = start + len(content)
            if (closed := _closed(chat, end)) != end:
                return closed
    return None


def _without_thought(message: Mapping[str, Any]) -> str:
    return str(message["content"].rpartition("</think>")[2].strip())


def _rendered_end(chat: _Chat, index: int) -> int | None:
    """The end of an answer where the chat up to and with it is a prefix of the whole."""
    upto = chat.prefix(index + 1, add_generation_prompt=False).rstrip()
    if not chat.text.startswith(upto):
        return None
    return len(upto) if upto.endswith(chat.template.closings) else _closed(chat, len(upto))


def _closed(chat: _Chat, end: int) -> int:
    """Behind the closing token that follows at `end`, blanks between; `end` itself when none does."""
    blank = _BLANK.match(chat.text, end)
    after = blank.end() if blank else end
    lengths = [len(closing) for closing in chat.template.closings if chat.text.startswith(closing, after)]
    return after + max(lengths) if lengths else end


def _probed_span(chat: _Chat, index: int) -> Span | None:
    message = chat.messages[index]
    if not message["content"].strip():
        return _call_span(chat, index) if message.get("tool_calls") else None
    first, second = (chat.probed(index, probe) for probe in PROBES)
    if first == second:
        return None  # the template does not show this answer
    before, after = _common(first, second)
    start, end = _common_edges(chat.text, first[:before], first[len(first) - after :])
    if start >= end:
        raise UnlocatedError(f"answer {index} is in the rendered chat and cannot be told from what is around it")
    if _has_reasoning(message):
        prompted = _answer_start(chat, index)
        start = start if prompted is None else min(start, prompted)
    if message.get("tool_calls"):
        return start, _call_end(chat, index, end)
    return start, _closed(chat, end)


def _call_span(chat: _Chat, index: int) -> Span:
    start = _answer_start(chat, index)
    if start is None:
        raise UnlocatedError(f"tool call {index} follows a generation prompt that the rendered chat does not show")
    return start, _call_end(chat, index, start)


def _call_end(chat: _Chat, index: int, start: int) -> int:
    """Behind the first token after `start` that closes this turn when it is the last one."""
    last = chat.prefix(index + 1, add_generation_prompt=False).rstrip()
    closing = max((c for c in chat.template.closings if last.endswith(c)), key=len, default="")
    found = chat.text.find(closing, start) if closing else -1
    if found < 0:
        raise UnlocatedError(f"tool call {index} has no closing token that tells where it ends")
    return found + len(closing)


def _common(first: str, second: str) -> tuple[int, int]:
    """How many characters two texts share at the front, and at the end of the rest."""
    before = _shared(first, second)
    return before, _shared(first[before:][::-1], second[before:][::-1])


def _common_edges(text: str, before: str, after: str) -> Span:
    """What of `text` is neither the front that it shares with `before` nor the end shared with `after`."""
    return _shared(text, before), len(text) - _shared(text[::-1], after[::-1])


def _shared(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))

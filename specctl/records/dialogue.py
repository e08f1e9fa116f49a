"""What is asked of a target turn by turn, and what it answered. No torch, no files."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specctl.records.conversation import Conversation, Turn
from specctl.records.sample import Dropped

# What servers call an answer that its author ended. Anything else (`length`, `content_filter`,
# `abort`) was cut by somebody.
ENDED: Final = frozenset({"stop", "eos_token", "stop_sequence"})
CALLED: Final = frozenset({"tool_calls", "function_call"})


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy, and `top_p` then 1."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int

    def seed_of(self, *parts: str) -> int:
        """31 bits from the seed and `parts`: equal noise for all rows would correlate them."""
        digest = hashlib.sha256(json.dumps([self.seed, *parts]).encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@dataclass(frozen=True, slots=True)
class Dialogue:
    """System and user turns in order; each user turn awaits an answer.

    `key` is 32 hexadecimal digits of the row's id and content, never of its position.
    """

    key: str
    row_id: str
    asked: Sequence[Turn]
    where: str
    tools: Sequence[Mapping[str, Any]] | None = None
    category: str | None = None

    @property
    def num_questions(self) -> int:
        return sum(turn.role == "user" for turn in self.asked)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `num_tokens` is None where a server does not say."""

    content: str
    finish_reason: str
    num_tokens: int | None = None
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()

    @property
    def is_cut(self) -> bool:
        return self.finish_reason not in ENDED | CALLED

    def message(self) -> dict[str, Any]:
        """The dict that a chat template reads."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass(frozen=True, slots=True)
class Answered:
    """A dialogue and its answers, fewer than its questions where one was cut or the context full."""

    dialogue: Dialogue
    answers: Sequence[Answer]

    @property
    def is_truncated(self) -> bool:
        return self.answers[-1].is_cut

    def messages(self) -> list[dict[str, Any]]:
        """The conversation up to its last answer."""
        return [*_history(self.dialogue, self.answers[:-1]), self.answers[-1].message()]


@dataclass(frozen=True, slots=True)
class Failed:
    """A dialogue that a server did not answer. `reason` is a short stable slug."""

    dialogue: Dialogue
    reason: str
    detail: str


def dialogue(row: Conversation) -> Dialogue | Dropped:
    """What `row` asks, its assistant turns left out; or why it cannot be asked.

    Tool results belong to calls of the answers that are replaced, so rows with them are refused.
    """
    asked = [turn for turn in row.turns if turn.role in ("system", "user")]
    if any(turn.role == "tool" for turn in row.turns):
        return Dropped(row.where, "tool_turns", "its tool results answer calls that would be replaced")
    if not any(turn.role == "user" for turn in asked):
        return Dropped(row.where, "no_user_turn", "nothing is asked in it")
    body = [row.row_id, [turn.message() for turn in asked], row.tools]
    key = hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return Dialogue(key, row.row_id or key, asked, row.where, row.tools, row.category)


def next_question(asked: Dialogue, answers: Sequence[Answer]) -> list[dict[str, Any]] | None:
    """The messages up to the first question that has no answer; None when there is none to ask.

    A cut answer or a tool call ends the conversation: what follows would build on a bad history.
    """
    if len(answers) == asked.num_questions or (answers and answers[-1].finish_reason not in ENDED):
        return None
    return _history(asked, answers)


def _history(asked: Dialogue, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    open_answers = iter(answers)
    for turn in asked.asked:
        messages.append(turn.message())
        if turn.role == "user":
            answer = next(open_answers, None)
            if answer is None:
                break
            messages.append(answer.message())
    return messages

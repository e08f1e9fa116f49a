"""A row of DATA as read, before any tokenizer has seen it. No torch, no transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message. `content` is text or the template's content parts; `extra` holds what else the
    template may read (`tool_calls`, `reasoning_content`, `name`, `tool_call_id`)."""

    role: Role
    content: Any
    extra: Mapping[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """The dict that a chat template reads."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order. `is_cut` says that the last answer stopped at a token limit, not at its end.

    A role that speaks twice in a row is merged; MT-Bench `turns` stay apart, to be asked one by one.
    """

    turns: Sequence[Turn]
    where: str
    row_id: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    category: str | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class PlainText:
    """A row of running text, all of it supervised."""

    text: str
    where: str
    row_id: str | None = None


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A row that was tokenised elsewhere; passes without tokenizer or template."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    where: str
    row_id: str | None = None

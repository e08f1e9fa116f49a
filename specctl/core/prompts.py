"""The prompts of an evaluation: of a file or of a set that specctl brings, as token ids of a target."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specctl
from specctl.core.chat import own_bos, with_one_bos
from specctl.core.conversations import read_rows
from specctl.core.generation import PromptEncoder
from specctl.core.target import load_tokenizer
from specctl.errors import DataError, UsageError
from specctl.records.conversation import Conversation
from specctl.records.dialogue import Answer, Dialogue, dialogue, next_question
from specctl.records.sample import Dropped
from specctl.records.target import TargetSpec

SETS: Mapping[str, str] = {
    "mt-bench": "mt-bench/question.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "gsm8k": "gsm8k/test.jsonl",
}
"""Names of the sets that specctl brings, with the file of each; their licences lie beside them."""


@dataclass(frozen=True, slots=True)
class Encoder:
    """Messages to token ids by the target's chat template, or plain text where the target has none."""

    tokenizer: Any
    chat: PromptEncoder | None

    @property
    def template_hash(self) -> str | None:
        """The template in 32 hexadecimal digits."""
        return None if self.chat is None else self.chat.template_hash

    def encode(self, asked: Dialogue, answers: Sequence[Answer], limit: int | None) -> tuple[int, ...] | None:
        """The next question's prompt, None where there is none or the context has no room for `limit` more."""
        messages = next_question(asked, answers)
        if messages is None:
            return None
        if self.chat is None:
            text = "\n\n".join(str(message["content"]) for message in messages)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return tuple(with_one_bos(ids, own_bos(self.tokenizer))) or None
        prompt = self.chat.encode(messages, asked.tools, where=asked.where)
        if isinstance(prompt, Dropped) or (prompt.room is not None and limit is not None and prompt.room < limit):
            return None
        return tuple(prompt.ids)


def open_prompts(spec: TargetSpec, *, trust_remote_code: bool = False) -> Encoder:
    """The encoder of a target. Raises TargetError for a target without a tokenizer."""
    from transformers import AutoConfig

    tokenizer = load_tokenizer(spec, trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        return Encoder(tokenizer, None)
    config = AutoConfig.from_pretrained(spec.path, trust_remote_code=trust_remote_code).get_text_config()
    return Encoder(tokenizer, PromptEncoder(tokenizer, getattr(config, "max_position_embeddings", None)))


def prompt_file(name: str) -> Path:
    """The file of a set, or the file called `name`. Raises UsageError when there is neither."""
    if name in SETS:
        return Path(specctl.__file__).parent / "prompts" / SETS[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"`--prompts {name}` is neither a file nor a set", hint=f"the sets are {', '.join(SETS)}; files are JSONL"
        )
    return path


def read_dialogues(path: Path, limit: int | None, seed: int) -> list[Dialogue]:
    """What a file asks, each once, in an order that follows from seed and content; the first `limit` of it.

    Drawn by hash, so that a few prompts of a sorted file are of all its kinds. Raises DataError for a file
    that asks nothing.
    """
    found: dict[str, Dialogue] = {}
    for row in read_rows([str(path)]):
        asked = dialogue(row) if isinstance(row, Conversation) else row
        if isinstance(asked, Dialogue):
            found.setdefault(asked.key, asked)
    if not found:
        raise DataError("the file asks nothing", where=str(path), hint="JSONL with `messages`, `prompt` or `question`")
    order = sorted(found.values(), key=lambda asked: hashlib.sha256(f"{seed}\0{asked.key}".encode()).digest())
    return order[:limit]

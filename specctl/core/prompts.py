"""The prompts of an evaluation: of a file or of a set that specctl brings, as token ids of a target."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import specctl
from specctl.core.chat import effective_template, own_bos, with_one_bos
from specctl.core.conversations import read_rows
from specctl.core.generation import PromptEncoder
from specctl.core.positions import max_positions
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
    max_positions: int | None = None

    @property
    def template_hash(self) -> str | None:
        """The template in 32 hexadecimal digits."""
        return None if self.chat is None else self.chat.template_hash

    def encode(self, asked: Dialogue, answers: Sequence[Answer], limit: int | None) -> tuple[int, ...] | None:
        """The next question's prompt; None where there is none, the template refuses it, or the context has no
        room for it and `limit` tokens more.
        """
        messages = next_question(asked, answers)
        if messages is None:
            return None
        if self.chat is None:
            text = "\n\n".join(str(message["content"]) for message in messages)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = with_one_bos(ids, own_bos(self.tokenizer))
        else:
            prompt = self.chat.encode(messages, asked.tools, where=asked.where)
            ids = () if isinstance(prompt, Dropped) else prompt.ids
        if not ids or (self.max_positions is not None and len(ids) + (limit or 0) > self.max_positions):
            return None
        return tuple(ids)


def open_prompts(spec: TargetSpec, *, trust_remote_code: bool = False) -> Encoder:
    """The encoder of a target. Raises TargetError for a target without a tokenizer."""
    tokenizer = load_tokenizer(spec, trust_remote_code=trust_remote_code)
    longest = max_positions(spec, trust_remote_code=trust_remote_code)
    # Of several templates the one that `extract` takes.
    tokenizer.chat_template = effective_template(tokenizer, None)
    chat = PromptEncoder(tokenizer, longest, spec.vocab_size) if tokenizer.chat_template else None
    return Encoder(tokenizer, chat, longest)


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


def read_dialogues(path: Path, limit: int | None, seed: int, *, refused: Counter[str] | None = None) -> list[Dialogue]:
    """What a file asks, each once, in an order that follows from seed and content; the first `limit` of it.

    Drawn by hash, so that a few prompts of a sorted file are of all its kinds. An id that the file gives to
    several is told apart by their content: results are kept by id. Rows that ask nothing are counted in
    `refused` by their reason. Raises DataError for a file that asks nothing.
    """
    found: dict[str, Dialogue] = {}
    reasons: Counter[str] = Counter()
    for row in read_rows([str(path)]):
        asked = dialogue(row) if isinstance(row, Conversation) else row
        if isinstance(asked, Dialogue):
            found.setdefault(asked.key, asked)
        else:
            reasons[asked.reason if isinstance(asked, Dropped) else "not_a_conversation"] += 1
    if not found:
        why = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
        raise DataError(
            f"the file asks nothing{f': {why}' if why else ''}",
            where=str(path),
            hint="JSONL with `messages`, `prompt` or `question`",
        )
    if refused is not None:
        refused.update(reasons)
    times = Counter(asked.row_id for asked in found.values())
    order = sorted(found.values(), key=lambda asked: hashlib.sha256(f"{seed}\0{asked.key}".encode()).digest())
    return [a if times[a.row_id] == 1 else replace(a, row_id=f"{a.row_id}-{a.key[:8]}") for a in order[:limit]]

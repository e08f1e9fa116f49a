"""Answers that the target on this machine writes itself. Knows prompts and tokens, not files.

Batches are left-padded and run through transformers' `generate`. Its continuous batching is left
aside: it swallows errors in a thread of its own, prints to stdout, and costs 9 s of start-up on a
CPU; on that CPU it gave the same greedy tokens.

What a batch holds follows from the prompts and the batch size alone, never from what is done, so
that a resumed run computes the same batches and with them the same bits, greedy or sampled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch

from specctl.core.chat import check_ids, effective_template, own_bos, with_one_bos
from specctl.core.device import is_gpu
from specctl.core.lengths import forget_lengths
from specctl.core.positions import max_positions
from specctl.core.products import quick_linears
from specctl.core.target import LoadedTarget, load_tokenizer
from specctl.core.templates import TEMPLATE_ERRORS, on_fixed_day
from specctl.core.thoughts import spoken, with_reasoning
from specctl.errors import MachineError, TargetError
from specctl.records.dialogue import Answer, Answered, Dialogue, Sampling, next_question
from specctl.records.sample import Dropped
from specctl.records.target import TargetSpec

# Prompts are sorted by length within this many batches: little padding, bounded memory.
WINDOW_BATCHES = 8
OPEN_REASONING = re.compile(r"<think>\s*\Z")


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Messages to token ids, as the target's chat template writes them."""

    tokenizer: Any
    max_positions: int | None
    vocab_size: int | None = None

    @property
    def template_hash(self) -> str:
        return hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()[:32]

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, *, where: str
    ) -> Prompt | Dropped:
        """The prompt, or why the template or the target's context has no place for it."""
        from jinja2 import TemplateError

        try:
            template = str(self.tokenizer.chat_template)
            text: str = self.tokenizer.apply_chat_template(
                [with_reasoning(message, template) for message in messages],
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
                chat_template=on_fixed_day(template),
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            return Dropped(where, "template_error", f"the chat template refuses it: {error}")
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            return Dropped(where, "empty_prompt", "the chat template makes nothing of it")
        ids = with_one_bos(ids, own_bos(self.tokenizer))  # as `extract` reads the answers
        check_ids(ids, self.vocab_size, self.tokenizer)
        room = None if self.max_positions is None else self.max_positions - len(ids)
        if room is not None and room < 1:
            return Dropped(where, "prompt_too_long", f"{len(ids)} tokens; the target takes {self.max_positions}")
        opened = OPEN_REASONING.search(text)
        return Prompt(ids, room, opened.group() if opened else "")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, how many more the context takes (None: no limit known), and how the answer begins.

    A template that opens `<think>` itself leaves the answer without it: `opening` gives it back.
    """

    ids: Sequence[int]
    room: int | None
    opening: str


def open_encoder(
    spec: TargetSpec, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PromptEncoder:
    """The encoder of a target, with the template in the file `chat_template` instead of its own.

    Raises TargetError for a file that cannot be read, and where there is no template.
    """
    tokenizer = load_tokenizer(spec, trust_remote_code=trust_remote_code)
    # Of several the same that `extract` takes; `apply_chat_template` would choose by row.
    tokenizer.chat_template = effective_template(tokenizer, chat_template)
    if not tokenizer.chat_template:
        raise TargetError(
            "the target's tokenizer has no chat template",
            where=spec.path,
            hint="pass one with `--chat-template FILE`; a base model answers no questions",
        )
    return PromptEncoder(tokenizer, max_positions(spec, trust_remote_code=trust_remote_code), spec.vocab_size)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded target that answers. `stops` are all tokens that end an answer by its files."""

    target: LoadedTarget
    encoder: PromptEncoder
    stops: Sequence[int]
    pad: int


def open_speaker(target: LoadedTarget, encoder: PromptEncoder) -> Speaker:
    """`target`, ready to answer in its own distribution.

    Penalties, top-k and temperature of its generation config are put aside: a draft learns what the
    target itself says, and `generate` would mix them into whatever it is passed.
    """
    from transformers import GenerationConfig

    model: Any = target.model
    stops: list[int] = []
    for ids in (model.generation_config.eos_token_id, encoder.tokenizer.eos_token_id):
        found = ids if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)
        stops.extend(i for i in found if i not in stops)
    model.generation_config = GenerationConfig()
    pad = encoder.tokenizer.pad_token_id
    return Speaker(target, encoder, stops, pad if pad is not None else next(iter(stops), 0))


def answer_locally(
    dialogues: Iterable[Dialogue],
    encoder: PromptEncoder,
    *,
    load: Callable[[], LoadedTarget],
    sampling: Sampling,
    batch: int,
    is_done: Callable[[Dialogue], bool],
) -> Generator[list[Answered | Dropped], None, None]:
    """Answered batches, in an order that depends on the prompts alone.

    Weights load when the first batch needs them. A batch with one row missing is computed whole:
    a row's bits may depend on its neighbours. Raises MachineError when memory runs out.
    """
    speaker: Speaker | None = None
    for window in _windows(dialogues, batch * WINDOW_BATCHES):
        if all(map(is_done, window)):
            continue
        sizes, refused = _first_prompts(window, encoder)
        if refused:
            yield [*refused]
        for rows in _batches(sizes, batch):
            if not all(map(is_done, rows)):
                speaker = speaker or open_speaker(load(), encoder)
                yield [*answer_batch(rows, speaker, sampling=sampling)]


def answer_batch(rows: Sequence[Dialogue], speaker: Speaker, *, sampling: Sampling) -> list[Answered]:
    """All turns of `rows`, turn after turn; their first prompts fit the context.

    A conversation whose history outgrows the context ends at its last answer.
    """
    answers: list[list[Answer]] = [[] for _ in rows]
    for turn in range(max(row.num_questions for row in rows)):
        asked: list[tuple[int, Prompt]] = []
        for i, row in enumerate(rows):
            messages = next_question(row, answers[i]) if len(answers[i]) == turn else None
            prompt = None if messages is None else speaker.encoder.encode(messages, row.tools, where=row.where)
            if isinstance(prompt, Prompt):
                asked.append((i, prompt))
        if not asked:
            break
        seed = sampling.seed_of(str(turn), *(rows[i].key for i, _ in asked))
        tokens = generate([prompt for _, prompt in asked], speaker, sampling=sampling, seed=seed)
        for (i, prompt), ids in zip(asked, tokens, strict=True):
            answers[i].append(_answer(prompt, ids, speaker))
    return [Answered(row, found) for row, found in zip(rows, answers, strict=True)]


def generate(prompts: Sequence[Prompt], speaker: Speaker, *, sampling: Sampling, seed: int) -> list[list[int]]:
    """The new tokens of each prompt, its stop token included, at most `max_new_tokens` and its room."""
    width = max(len(p.ids) for p in prompts)
    ids_BT = torch.full((len(prompts), width), speaker.pad, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        ids_BT[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        mask_BT[row, width - len(prompt.ids) :] = 1
    limits = [min(sampling.max_new_tokens, p.room or sampling.max_new_tokens) for p in prompts]
    settings = _settings(sampling, speaker, max(limits))
    device, model = speaker.target.device, cast(Any, speaker.target.model)
    forget_lengths(model)
    try:
        # transformers samples from the global generator, which fork_rng puts back afterwards.
        quick = quick_linears(model)
        with quick, torch.inference_mode(), torch.random.fork_rng(devices=[device] if is_gpu(device) else []):
            torch.manual_seed(seed)
            out_BT = model.generate(
                input_ids=ids_BT.to(device), attention_mask=mask_BT.to(device), generation_config=settings
            )
    except torch.OutOfMemoryError as error:
        raise MachineError(
            f"{device} has no memory for {len(prompts)} answers at once",
            hint="run again with a smaller `--batch`; finished rows are kept",
        ) from error
    new = out_BT[:, width:].tolist()
    return [_until_stop(row[:limit], speaker.stops) for row, limit in zip(new, limits, strict=True)]


def _settings(sampling: Sampling, speaker: Speaker, max_new_tokens: int) -> Any:
    from transformers import GenerationConfig

    ends = {"eos_token_id": list(speaker.stops) or None, "pad_token_id": speaker.pad, "use_cache": True}
    if sampling.temperature == 0:
        return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, **ends)
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        **ends,
    )


def _until_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in stops), None)
    return ids if end is None else ids[: end + 1]


def _answer(prompt: Prompt, ids: list[int], speaker: Speaker) -> Answer:
    is_ended = bool(ids) and ids[-1] in speaker.stops
    text, reasoning = spoken(speaker.encoder.tokenizer, ids[:-1] if is_ended else ids)
    if not is_ended:
        text = text.rstrip("\ufffd")  # a character that the cut split; the target wrote no such thing
    return Answer(prompt.opening + text, "stop" if is_ended else "length", len(ids), reasoning)


def _windows(dialogues: Iterable[Dialogue], size: int) -> Iterator[list[Dialogue]]:
    rest = iter(dialogues)
    while window := list(islice(rest, size)):
        yield window


def _first_prompts(
    window: Sequence[Dialogue], encoder: PromptEncoder
) -> tuple[list[tuple[int, Dialogue]], list[Dropped]]:
    sizes: list[tuple[int, Dialogue]] = []
    refused: list[Dropped] = []
    for row in window:
        prompt = encoder.encode(next_question(row, ()) or [], row.tools, where=row.where)
        if isinstance(prompt, Dropped):
            refused.append(prompt)
        else:
            sizes.append((len(prompt.ids), row))
    return sizes, refused


def _batches(sizes: Sequence[tuple[int, Dialogue]], batch: int) -> Iterator[list[Dialogue]]:
    """Longest first: what does not fit in memory shows at once."""
    rows = [row for _, row in sorted(sizes, key=lambda pair: (-pair[0], pair[1].key))]
    for start in range(0, len(rows), batch):
        yield rows[start : start + batch]

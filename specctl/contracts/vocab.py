"""Rules on the two tables over a vocabulary: the head's rows and the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in

if TYPE_CHECKING:
    pass


@rule(
    "DRAFT_VOCAB_UNSAID",
    "error",
    "the head is reduced and config.json does not say so",
    story="lm_head and d2t agree on a reduced vocabulary, and `draft_vocab_size` is missing, null or the whole. The "
    "server builds a head over the whole vocabulary and stops at the shape.",
    fix="write `draft_vocab_size`: the rows of lm_head",
    source="vLLM 0.33.0 models/llama_eagle3.py:314-316; sglang 0.5.23 models/llama_eagle3.py:306",
)
def draft_vocab_unsaid(subject: Subject) -> Iterator[Found]:
    rows = subject.unsaid_draft_vocab
    if rows is not None and not subject.misfits:
        said = subject.settings.get("draft_vocab_size")
        repair = Repair(set={("draft_vocab_size",): rows})
        found = f"{'nothing' if said is None else said}, and lm_head and d2t of {rows}"
        yield Found("config.json: draft_vocab_size", str(rows), found, repair=repair)


@rule(
    "LM_HEAD_ROWS",
    "error",
    "the head's rows are not the draft's vocabulary",
    story="lm_head has one row per token of the draft's vocabulary and the draft's hidden width. Another number of "
    "rows stops the load, or shifts every id.",
    fix="correct `draft_vocab_size`, or export the head again",
    source="vLLM 0.33.0 layers/vocab_parallel_embedding.py:515; SafeAILab/EAGLE#249",
)
def lm_head_rows(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("lm_head.weight")
    if head is None or entry is None or head.draft_vocab_size > head.vocab_size:
        return
    expected = (head.draft_vocab_size, head.hidden_size)
    if entry.shape != expected:
        yield Found(subject.place("lm_head.weight"), f"{list(expected)}", f"{list(entry.shape)}")


@rule(
    "LM_HEAD_MISSING",
    "error",
    "the draft has no head of its own",
    story="vLLM lends the draft the target's head. That is right only over the full vocabulary and for a head that "
    "was trained so; with a reduced one vLLM cuts the target's rows to the first draft_vocab_size and maps those. "
    "SGLang leaves the head random unless draft_vocab_size is null: acceptance 1.00 with a healthy server.",
    fix="export the head with lm_head.weight",
    source="vLLM 0.33.0 spec_decode/eagle/utils.py:107-119; sgl-project/sglang#27908",
)
def lm_head_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or "lm_head.weight" in subject.tensors or not subject.tensors:
        return
    expected = f"`lm_head.weight` [{head.draft_vocab_size}, {head.hidden_size}]"
    if head.is_reduced:
        yield Found("the weights", expected, "no such tensor")
    elif subject.runtime == "vllm":
        yield Found("the weights", expected, "none: vLLM borrows the target's", level="warning")
    elif subject.raw.get("draft_vocab_size") is not None:
        repair = Repair(set={("draft_vocab_size",): None})
        yield Found("the weights", f"{expected}, or draft_vocab_size null", "neither", repair=repair)


@rule(
    "EMBED_ROWS",
    "error",
    "the embedding's shape is not vocabulary by width",
    story="The draft embeds the target's tokens, so its table has the target's vocabulary as rows, also where the "
    "draft proposes from a part of it, and the draft's own width.",
    fix="correct `vocab_size` (it is the target's), or export the embedding again",
    source="vLLM 0.33.0 models/llama_eagle3.py:174; vllm-project/speculators#188",
)
def embed_rows(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("embed_tokens.weight")
    if head is not None and entry is not None and entry.shape != (head.vocab_size, head.hidden_size):
        expected = f"[{head.vocab_size}, {head.hidden_size}]"
        yield Found(subject.place("embed_tokens.weight"), expected, f"{list(entry.shape)}")


@rule(
    "EMBED_SHARED",
    "note",
    "the draft uses the target's embedding",
    story="A draft without a table of its own reads the target's. That is the usual way where both have the same "
    "width and the draft was trained with the target's embedding frozen.",
    fix="none needed",
    source="vLLM 0.33.0 spec_decode/eagle/utils.py:18-34",
)
def embed_shared(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or "embed_tokens.weight" in subject.tensors or not subject.tensors:
        return
    if head.hidden_size == head.target_hidden_size:
        yield Found("the weights", "`embed_tokens.weight`, or the target's", "none: shared with the target")


@rule(
    "EMBED_WIDTH",
    "error",
    "the target's embedding does not fit this draft",
    story="The draft brings no embedding, so it gets the target's, which has another width. vLLM fails at the first "
    "step, or runs on uninitialised memory, depending on the runner.",
    fix="export the head together with its embedding",
    source="vllm-project/vllm#18906; vLLM 0.33.0 llm_base_proposer.py:1476-1498",
)
def embed_width(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or "embed_tokens.weight" in subject.tensors or not subject.tensors:
        return
    if head.hidden_size != head.target_hidden_size:
        found = f"none, and the target's is {head.target_hidden_size} wide"
        yield Found("the weights", f"`embed_tokens.weight` [{head.vocab_size}, {head.hidden_size}]", found)


@rule(
    "DRAFT_VOCAB_LARGER",
    "error",
    "the draft's vocabulary is larger than the target's",
    story="Some models pad their vocabulary, and a draft made from the padded size has rows for tokens that do not "
    "exist. vLLM scatters draft logits into vocab_size columns and fails on the surplus; SGLang proposes ids that the "
    "target has no row for.",
    fix="export the head with the target's vocab_size, or a reduced one with a map",
    source="vLLM 0.33.0 models/llama_eagle3.py:379; vllm-project/vllm#55133",
)
def draft_vocab_larger(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.draft_vocab_size > head.vocab_size:
        expected = f"at most vocab_size, {head.vocab_size}"
        yield Found("config.json: draft_vocab_size", expected, str(head.draft_vocab_size))


RULES = rules_in(globals())

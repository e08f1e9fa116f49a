"""Rules on what a P-EAGLE head puts into the slots it guesses: the learned mask and the reserved token."""

from collections.abc import Iterator
from typing import Any, Final

from specctl.files.serverview import brief
from specctl.files.subject import MASK_TOKEN_KEYS, Subject
from specctl.records.contract import Found, Repair, rule, rules_in

MASK_BUFFER_SINCE: Final = (0, 22)
"""vLLM release whose buffer for the mask is as wide as fc instead of three times the draft's width."""

MASK_TOKEN_ID_SINCE: Final = (0, 28)
"""vLLM release that reads `mask_token_id` at the top beside the two older spellings."""


@rule(
    "MASK_HIDDEN_MISSING",
    "error",
    "a P-EAGLE head without its learned mask",
    story="Slots whose token is not known yet get `mask_hidden` in place of the target's states. vLLM stops without "
    "it: `mask_hidden not found in weights but model is configured for parallel drafting`.",
    fix="export the head with mask_hidden, or serve it as EAGLE-3 with the flag off",
    source="vLLM 0.33.0 models/llama_eagle3.py:450-455",
)
def mask_hidden_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and subject.is_parallel and "mask_hidden" not in subject.tensors and subject.tensors:
        yield Found("the weights", f"`mask_hidden` [1, {head.fc_width}]", "no such tensor")


@rule(
    "MASK_HIDDEN_SIZE",
    "error",
    "the learned mask does not fit fc",
    story="`mask_hidden` stands in for the fused states, so it has as many numbers as fc has columns. Before 0.22 "
    "vLLM's buffer for it is three times the draft's own width, whatever the target's.",
    fix="export the head again; with a target of another width use vLLM 0.22 or newer",
    source="vLLM 0.21.0 and 0.22.0 models/llama_eagle3.py:346",
)
def mask_hidden_size(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("mask_hidden")
    if head is None or entry is None:
        return
    if _count(entry.shape) != head.fc_width:
        yield Found(subject.place("mask_hidden"), f"{head.fc_width} numbers", f"{list(entry.shape)}")
    elif subject.runtime == "vllm" and subject.version < MASK_BUFFER_SINCE and head.fc_width != 3 * head.hidden_size:
        expected = f"{3 * head.hidden_size} numbers with vLLM before 0.22"
        yield Found(subject.place("mask_hidden"), expected, f"{list(entry.shape)}")


@rule(
    "MASK_HIDDEN_SHAPE",
    "note",
    "the learned mask has an unusual shape",
    story="vLLM flattens the tensor, so any shape of the right size loads. Writers use [1, W], [1, 1, W] or [W]; in "
    "one row per state the order has to be that of fc's blocks.",
    fix="none needed if the rows are in fc's order",
    source="vLLM 0.33.0 models/llama_eagle3.py, load_weights",
)
def mask_hidden_shape(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("mask_hidden")
    if head is None or entry is None or _count(entry.shape) != head.fc_width:
        return
    if entry.shape not in ((head.fc_width,), (1, head.fc_width), (1, 1, head.fc_width)):
        flat = f"[1, {head.fc_width}]"
        yield Found(subject.place("mask_hidden"), flat, f"{list(entry.shape)}, which flattens to {head.fc_width}")


@rule(
    "MASK_HIDDEN_ZERO",
    "warning",
    "the learned mask holds no learned numbers",
    story="An untrained mask is a constant, most often zero. Depth 0 works as in EAGLE-3 and every deeper token is "
    "guessed from nothing.",
    fix="check that training updated `mask_hidden` and that it was saved after, not before",
    source="vLLM 0.33.0 llm_base_proposer.py:1403-1416",
)
def mask_hidden_zero(subject: Subject) -> Iterator[Found]:
    values = subject.table("mask_hidden")
    if values is not None and not subject.is_deep and not bool((abs(values) < float("inf")).all()):
        yield Found(subject.place("mask_hidden"), "finite numbers", "NaN or infinity", level="error")
    elif values is not None and values.size > 1 and bool((values == values.flat[0]).all()):
        yield Found(subject.place("mask_hidden"), "learned numbers", f"{values.size} times {float(values.flat[0]):g}")


@rule(
    "MASK_TOKEN_MISSING",
    "error",
    "config.json names no token for masked slots",
    story="Each slot that is drafted ahead needs an input token, a reserved one. Trainers resolve it at run time and "
    "some never save it; vLLM stops and asks for `pard_token` or `ptd_token_id`.",
    fix="write the id the head was trained with as mask_token_id, pard_token and ptd_token_id",
    source="vLLM 0.33.0 llm_base_proposer.py:374-379; sgl-project/SpecForge configs/qwen3-8b-peagle.json",
)
def mask_token_missing(subject: Subject) -> Iterator[Found]:
    if subject.is_parallel and subject.checkpoint.has_config and not subject.mask_token_ids:
        yield Found("config.json: mask_token_id", "a token id of the target's vocabulary", "no such key")


@rule(
    "MASK_TOKEN_DISAGREES",
    "error",
    "the reserved token is said twice, differently",
    story="vLLM takes the first of dflash_config.mask_token_id, mask_token_id, dspark_noise_token_id, pard_token and "
    "ptd_token_id, older releases another one. Two values mean that one release runs the head on a token it has "
    "never seen.",
    fix="write the trained id under every key",
    source="vLLM 0.33.0 llm_base_proposer.py:355-379",
)
def mask_token_disagrees(subject: Subject) -> Iterator[Found]:
    ids = subject.mask_token_ids
    if subject.is_parallel and len(set(map(repr, ids.values()))) > 1:
        found = ", ".join(f"{key} {brief(value)}" for key, value in ids.items())
        yield Found("config.json: mask_token_id", "one id under every key", found)


@rule(
    "MASK_TOKEN_RANGE",
    "error",
    "the reserved token is not in the vocabulary",
    story="The id is looked up in the draft's embedding without a check. Outside it the read is out of bounds: a "
    "device assert, or some other memory.",
    fix="write the id the head was trained with",
    source="vLLM 0.33.0 llm_base_proposer.py:355-379",
)
def mask_token_range(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or not subject.is_parallel:
        return
    for key, value in subject.mask_token_ids.items():
        if type(value) is not int or not 0 <= value < head.vocab_size:
            yield Found(f"config.json: {key}", f"a whole number from 0 to {head.vocab_size - 1}", brief(value))
            return


@rule(
    "MASK_TOKEN_EOS",
    "error",
    "the reserved token ends the text",
    story="The reserved token fills unknown slots. An end-of-sequence token there is one the head met as a real "
    "token, with another meaning, at the end of every answer.",
    fix="train with an unused id of the vocabulary",
    source="NVIDIA-NeMo/Automodel#2376; speculators 0.9.0 train/utils.py:16",
)
def mask_token_eos(subject: Subject) -> Iterator[Found]:
    ends = subject.settings.get("eos_token_id")
    own = {eos for eos in (ends if isinstance(ends, list) else [ends]) if type(eos) is int}
    own |= set(subject.target.eos_token_ids) if subject.target is not None else set()
    for key, value in subject.mask_token_ids.items():
        if subject.is_parallel and type(value) is int and value in own:
            yield Found(f"config.json: {key}", "a token that is not an end of sequence", str(value))
            return


@rule(
    "MASK_TOKEN_SPELLING",
    "warning",
    "older vLLM does not read this key",
    story="Up to 0.27 vLLM looks for `pard_token` and `ptd_token_id` and not for `mask_token_id`. A head that has "
    "only the new spelling loads in one release and not in the one before.",
    fix="write the id under all three keys; `--fix` does",
    source="vLLM 0.27.1 and 0.28.0 v1/spec_decode/llm_base_proposer.py:360",
    needs=("vllm",),
    since="an error with vLLM before 0.28",
)
def mask_token_spelling(subject: Subject) -> Iterator[Found]:
    ids = subject.mask_token_ids
    values = {value for value in ids.values() if type(value) is int}
    if not subject.is_parallel or subject.is_speculators or len(values) != 1 or len(ids) == 0:
        return
    if not {"pard_token", "ptd_token_id"} & set(ids):
        repair = Repair(set={(key,): min(values) for key in MASK_TOKEN_KEYS})
        level: Any = "error" if subject.version < MASK_TOKEN_ID_SINCE else None
        found = f"only {', '.join(ids)}"
        yield Found("config.json: pard_token", f"{min(values)}", found, level=level, repair=repair)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


RULES = rules_in(globals())

"""Rules that only SGLang breaks by: keys it needs to find and steps it leaves out."""

from collections.abc import Iterator

from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in

CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@rule(
    "DRAFT_VOCAB_UNSAID_SGLANG",
    "error",
    "SGLang needs draft_vocab_size, if only as null",
    story="SGLang asks the config for `draft_vocab_size` and stops with an AttributeError where the key is absent. "
    "Null means the target's own head.",
    fix="write `draft_vocab_size`: the rows of lm_head, or null without one",
    source="sglang 0.5.23 models/llama_eagle3.py:306",
    needs=("sglang",),
)
def draft_vocab_unsaid(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or "draft_vocab_size" in subject.settings or subject.is_speculators:
        return
    own = subject.tensors.get("lm_head.weight")
    rows = own.shape[0] if own is not None and len(own.shape) == 2 else None
    if subject.settings.get("tie_word_embeddings") is not True and rows in (None, head.vocab_size):
        repair = Repair(set={("draft_vocab_size",): rows})
        yield Found(
            "config.json: draft_vocab_size", "null" if rows is None else str(rows), "no such key", repair=repair
        )


@rule(
    "FC_SKIPPED_SGLANG",
    "error",
    "SGLang leaves out fc for a single fused state",
    story="SGLang applies fc only where the states are wider than the draft. With one fused state of the draft's own "
    "width it passes the state on as it is, and the head meets inputs it was never trained on.",
    fix="serve this head with vLLM",
    source="sglang 0.5.23 models/llama_eagle3.py:238",
    needs=("sglang",),
)
def fc_skipped(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.use_aux and head.fc_width == head.hidden_size and "fc.weight" in subject.tensors:
        yield Found("config.json: num_aux_hidden_states", "states wider than the draft", f"one of {head.hidden_size}")


@rule(
    "EMBED_REPLACED_SGLANG",
    "note",
    "SGLang replaces the draft's embedding by the target's",
    story="Where the widths agree SGLang puts the target's table in the draft's place, whatever the file holds. That "
    "changes nothing for a head trained with the target's embedding frozen, and loses one that was trained.",
    fix="none needed where the trainer froze it; `--deep --target` compares the two",
    source="sglang 0.5.23 models/llama.py:910-918",
    needs=("sglang", "target"),
)
def embed_replaced(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or "embed_tokens.weight" not in subject.tensors or subject.is_deep:
        return  # with `--deep` EMBED_DIFFERS compares them
    if head.hidden_size == head.target_hidden_size:
        yield Found(subject.place("embed_tokens.weight"), "the target's table, or none", "a table of the draft's own")


@rule(
    "DTYPE_UNSAID_SGLANG",
    "warning",
    "SGLang serves this draft in another dtype than it has",
    story="With --dtype auto SGLang takes the dtype that the draft's own config names, and float16 where it names "
    "none or float32, also beside a bfloat16 target. Large states overflow there.",
    fix="write the dtype of the weights as `dtype` and `torch_dtype`, or pass --dtype",
    source="sglang 0.5.23 configs/model_config.py:2284-2322",
    needs=("sglang",),
)
def dtype_unsaid(subject: Subject) -> Iterator[Found]:
    said = subject.raw.get("dtype") or subject.raw.get("torch_dtype")
    if subject.head is None or not (said is None or isinstance(said, str)):
        return
    stored = {CONFIG_DTYPES.get(entry.dtype) for name, entry in subject.tensors.items() if name.endswith(".weight")}
    name = stored.pop() if len(stored) == 1 else None
    if said is not None and said.removeprefix("torch.") in (name, "bfloat16") and said != "float32":
        return
    if said is not None and said.removeprefix("torch.") != "float32" and name is None:
        return
    repair = Repair(set={("dtype",): name, ("torch_dtype",): name}) if name and name != "float32" else None
    found = "nothing, so float16" if said is None else "float32, served as float16" if said == "float32" else said
    yield Found("config.json: dtype", name or "the dtype of the weights", found, repair=repair)


RULES = rules_in(globals())

"""Rules on what a config copied from its target: ties, quantization, dtypes."""

from collections.abc import Iterator, Mapping

from specctl.files.subject import Subject, brief
from specctl.records.contract import Found, Repair, rule, rules_in


@rule(
    "TIED_REDUCED",
    "error",
    "head and embedding are tied and differ in size",
    story="A tied target hands `tie_word_embeddings: true` to its draft's config. The draft's head covers the "
    "reduced vocabulary and its embedding the whole one; SGLang then uses the embedding as the head, and trainers "
    "fail to reload.",
    fix="set `tie_word_embeddings` to false",
    source="sgl-project/SpecForge#139; NVIDIA-NeMo/Automodel#2319; sglang 0.5.23 models/llama_eagle3.py",
)
def tied_reduced(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.is_reduced and subject.settings.get("tie_word_embeddings") is True:
        repair = None if subject.is_speculators else Repair(set={("tie_word_embeddings",): False})
        yield Found(
            "config.json: tie_word_embeddings",
            f"false, for a head of {head.draft_vocab_size} rows and an embedding of {head.vocab_size}",
            "true",
            repair=repair,
        )


@rule(
    "QUANT_INHERITED",
    "error",
    "the config says quantized and the tensors are not",
    story="A draft's config copied from a quantized target keeps its `quantization_config`. The runtime then builds "
    "quantized layers for the draft and finds no scales for them.",
    fix="remove `quantization_config`",
    source="vLLM 0.33.0 models/utils.py:985; vllm-project/vllm#66546",
)
def quant_inherited(subject: Subject) -> Iterator[Found]:
    method = subject.raw.get("quantization_config")
    if not isinstance(method, Mapping) or not subject.tensors or subject.scales:
        return
    if all(
        entry.dtype in ("BF16", "F16", "F32") for name, entry in subject.tensors.items() if name.endswith(".weight")
    ):
        repair = Repair(unset=(("quantization_config",),))
        name = brief(method.get("quant_method"))
        yield Found("config.json: quantization_config", "none, for plain tensors", f"method {name}", repair=repair)


@rule(
    "QUANT_SCALES",
    "error",
    "the tensors are quantized and the config is not",
    story="Scales and packed weights mean nothing to a loader that was not told the method: it stops at the unknown "
    "names, or reads packed integers as weights.",
    fix="add the `quantization_config` the head was written with, or export it unquantized",
    source="vLLM 0.33.0 models/utils.py:442-448",
)
def quant_scales(subject: Subject) -> Iterator[Found]:
    scales = subject.scales
    is_told = "quantization_config" in subject.raw or "hf_quant_config.json" in subject.checkpoint.side_files
    if scales and not is_told:
        found = f"none, and {len(scales)} tensors such as `{scales[0]}`"
        yield Found("config.json: quantization_config", "the method of the scales in the weights", found)


@rule(
    "DTYPE_CONTRADICTS",
    "warning",
    "`dtype` and `torch_dtype` disagree",
    story="transformers 5 writes `dtype`, version 4 wrote `torch_dtype`. A config that was edited under both can "
    "say two things; which one counts depends on the reader's version.",
    fix="write the same value under both keys",
    source="transformers 5.24 `PreTrainedConfig`",
)
def dtype_contradicts(subject: Subject) -> Iterator[Found]:
    new, old = subject.raw.get("dtype"), subject.raw.get("torch_dtype")
    if isinstance(new, str) and isinstance(old, str) and _bare(new) != _bare(old):
        yield Found("config.json: torch_dtype", f"`dtype`, {new}", old)


def _bare(dtype: str) -> str:
    return dtype.removeprefix("torch.")


RULES = rules_in(globals())

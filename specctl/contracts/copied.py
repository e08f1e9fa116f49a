"""Rules on what a config copied from its target: ties, quantization, dtypes."""

from collections.abc import Iterator, Mapping

from specctl.errors import InputError
from specctl.files.inside import ClosedFile, inside
from specctl.files.jsonfile import read_json
from specctl.files.serverview import brief
from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in


@rule(
    "TIED_REDUCED",
    "error",
    "head and embedding are tied and are not one table",
    story="A tied target hands `tie_word_embeddings: true` to its draft's config. The draft's head covers the "
    "reduced vocabulary and its embedding the whole one; SGLang then uses the embedding as the head, also where the "
    "draft brings one of its own, and trainers fail to reload.",
    fix="set `tie_word_embeddings` to false",
    source="sgl-project/SpecForge#139; NVIDIA-NeMo/Automodel#2319; sglang 0.5.23 models/llama_eagle3.py",
)
def tied_reduced(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or subject.settings.get("tie_word_embeddings") is not True:
        return
    is_lost = subject.runtime == "sglang" and "lm_head.weight" in subject.tensors and not head.is_reduced
    if is_lost:
        repair = None if subject.is_speculators else Repair(set={("tie_word_embeddings",): False})
        yield Found("config.json: tie_word_embeddings", "false, for a head with lm_head", "true", repair=repair)
    elif head.is_reduced:
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
    is_beside = "hf_quant_config.json" in subject.checkpoint.side_files and method is None
    if is_beside and subject.runtime == "vllm" and subject.tensors and not subject.scales and _names_a_method(subject):
        yield Found("hf_quant_config.json", "no such file, for plain tensors", "one that names a method")
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


def _names_a_method(subject: Subject) -> bool:
    """Whether the file beside the weights says a method; ModelOpt writes one with null for plain heads."""
    try:
        record, _ = read_json(inside(subject.checkpoint.folder, "hf_quant_config.json"))
    except (InputError, ClosedFile):
        return True
    inner = record.get("quantization")
    return not isinstance(inner, Mapping) or inner.get("quant_algo") is not None


RULES = rules_in(globals())

"""Rules on config.json alone: types, sizes, and the class it names."""

from collections.abc import Iterator
from typing import Any, Final

from specctl.files.serverview import brief, release
from specctl.files.subject import Subject
from specctl.records.contract import Found, KeyPath, Repair, rule, rules_in
from specctl.records.headkeys import missing_sizes
from specctl.records.modeltypes import MODEL_TYPES
from specctl.records.runtimes import NEWEST, OLDEST, SGLANG_DRAFT_CLASSES, VLLM_DRAFT_CLASSES

TRAINER_CLASSES: Final = (
    "LlamaEagle3DraftModel",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "Eagle3DraftModel",
    "Eagle3Speculator",
)
"""Classes of trainers whose heads are made of Llama layers; serving has one name for them."""


@rule(
    "CONFIG_TYPE",
    "error",
    "a key of config.json has the wrong type",
    story="A number in quotes, a float where an id belongs or an id where a list belongs is taken as it stands by "
    "some readers and dies deep inside a loader in others. Layer ids of 2.0 compare equal to 2 in Python and index "
    "nothing in a tensor.",
    fix="write the value in the type that is expected",
    source="vLLM 0.33.0 models/llama_eagle3.py; transformers configuration classes",
)
def config_type(subject: Subject) -> Iterator[Found]:
    for path, expected in subject.misfits:
        value: Any = subject.raw
        for key in path:
            value = value[key]
        yield Found(f"config.json: {'.'.join(path)}", expected, brief(value))


@rule(
    "CONFIG_SIZE_MISSING",
    "error",
    "config.json leaves out a size",
    story="A size that is not said is not an error to transformers: it takes that of a 7B Llama (hidden 4096, 32 "
    "layers, vocabulary 32000). The draft is then built in the wrong shape.",
    fix="add the key with the head's own size",
    source="transformers 5.24 `LlamaConfig` defaults",
)
def config_size_missing(subject: Subject) -> Iterator[Found]:
    if not subject.checkpoint.has_config or subject.misfits:
        return
    for key in missing_sizes(subject.settings):
        prefix = "transformer_layer_config." if subject.is_speculators else ""
        yield Found(f"config.json: {prefix}{key}", "the head's own size", "no such key")


@rule(
    "HEADS_DIVIDE",
    "error",
    "numbers of heads that do not divide",
    story="Each key-value head serves a whole number of query heads, and transformers 5 refuses a Llama config whose "
    "hidden size is no multiple of the heads, also where head_dim is said. Other numbers stop the server.",
    fix="correct `num_attention_heads` or `num_key_value_heads`",
    source="vLLM 0.33.0 models/llama.py, LlamaAttention; transformers 5.24 `LlamaConfig.validate_architecture`",
)
def heads_divide(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None:
        return
    if head.num_attention_heads % head.num_key_value_heads:
        expected = f"a divisor of num_attention_heads, {head.num_attention_heads}"
        yield Found("config.json: num_key_value_heads", expected, str(head.num_key_value_heads))
    elif head.hidden_size % head.num_attention_heads and subject.raw.get("model_type") == "llama":
        expected = f"a divisor of hidden_size, {head.hidden_size}"
        yield Found("config.json: num_attention_heads", expected, str(head.num_attention_heads))
    elif head.head_dim % 2:
        yield Found("config.json: head_dim", "an even number, which rope turns in pairs", str(head.head_dim))


@rule(
    "ARCH_MISSING",
    "error",
    "config.json names no architecture",
    story="The runtime finds the draft's class by `architectures[0]`. Without it vLLM fills in the base model of the "
    "model_type and stops at a class of that name, Eagle3LlamaModel, which it does not have.",
    fix='write "architectures": ["LlamaForCausalLMEagle3"]',
    source="vLLM 0.33.0 transformers_utils/config.py:940-949",
)
def arch_missing(subject: Subject) -> Iterator[Found]:
    if not subject.checkpoint.has_config or subject.is_speculators or subject.raw.get("architectures"):
        return
    if all(path != ("architectures",) for path, _ in subject.misfits):
        repair = Repair(set={("architectures",): ["LlamaForCausalLMEagle3"]}) if subject.block == "llama" else None
        yield Found("config.json: architectures", "a list with one class", "nothing", repair=repair)


@rule(
    "ARCH_UNKNOWN",
    "error",
    "the runtime does not know the draft's class",
    story="Trainers save the name of their own class. The runtime looks it up in its registry, does not find it, "
    "and stops with a list of every model it has. vLLM first writes `Eagle3` before a name that neither begins nor "
    "ends with it, so LlamaForCausalLM is known to it and PEagleDraftModel is not.",
    fix='write "architectures": ["LlamaForCausalLMEagle3"], or convert the head to the vllm layout',
    source="vLLM 0.33.0 models/registry.py:655-745, configs/eagle.py:55-64; sglang 0.5.23 models/llama_eagle3.py",
)
def arch_unknown(subject: Subject) -> Iterator[Found]:
    if "speculators_config" in subject.raw or not subject.classes:
        return
    name = subject.classes[0]
    is_kept = subject.runtime == "sglang" or name.startswith("Eagle3") or name.endswith("Eagle3")
    built = name if is_kept else f"Eagle3{name}"
    first = VLLM_DRAFT_CLASSES.get(built)
    if built in SGLANG_DRAFT_CLASSES if subject.runtime == "sglang" else first is not None and first <= subject.version:
        return
    is_newer = subject.runtime == "vllm" and first is not None
    is_llama = subject.block == "llama" and not is_newer and (name in TRAINER_CLASSES or first is not None)
    came = f", which came with vLLM {release(first)}" if first and subject.runtime == "vllm" else ""
    yield Found(
        "config.json: architectures",
        "a class of the runtime, as LlamaForCausalLMEagle3",
        name + (f", which vLLM looks up as {built}" if built != name else "") + came,
        fix=f"use vLLM {release(first)} or newer" if is_newer and first else None,
        repair=Repair(set={("architectures",): ["LlamaForCausalLMEagle3"]}) if is_llama else None,
    )


@rule(
    "MODEL_TYPE_MISSING",
    "error",
    "config.json names no model_type",
    story="transformers chooses the class of the configuration by `model_type`. Without it the file is refused as "
    "an unrecognised model, except in the speculators layout, which must not have the key.",
    fix='write "model_type": "llama"',
    source="transformers 5.24 `AutoConfig.from_pretrained`; vLLM 0.33.0 transformers_utils/config.py:360-367",
)
def model_type_missing(subject: Subject) -> Iterator[Found]:
    if not subject.checkpoint.has_config or subject.is_speculators or subject.raw.get("model_type") is not None:
        return
    set_type: dict[KeyPath, Any] = {("model_type",): "qwen3" if subject.block == "qwen3" else "llama"}
    yield Found(
        "config.json: model_type", "the kind of decoder layer, as llama", "nothing", repair=Repair(set=set_type)
    )


@rule(
    "MODEL_TYPE_UNKNOWN",
    "error",
    "nobody knows this model_type",
    story="transformers and vLLM look the configuration's class up by `model_type` and refuse a name that neither "
    "has registered, before the draft is looked at.",
    fix='write "model_type": "llama" (or the kind of the draft\'s own layer)',
    source="transformers 5.24 `CONFIG_MAPPING_NAMES`; vLLM 0.33.0 transformers_utils/config.py:124-175",
)
def model_type_unknown(subject: Subject) -> Iterator[Found]:
    kind = subject.raw.get("model_type")
    if isinstance(kind, str) and kind not in MODEL_TYPES and not subject.is_speculators:
        head = subject.head
        settings: dict[KeyPath, Any] = {("model_type",): subject.block}
        settings |= {("head_dim",): head.head_dim} if head is not None else {}
        repair = Repair(set=settings)
        yield Found("config.json: model_type", subject.block, kind, repair=repair)


@rule(
    "ACTIVATION_UNKNOWN",
    "error",
    "the draft's activation is not one the servers have",
    story="The MLP of a Llama draft is gated with SiLU in both servers, which stop at any other: `Unsupported "
    "activation: ... Only silu is supported for now`. Gemma targets hand their own to a copied config.",
    fix="write silu if the head was trained so; a head trained with another cannot be served",
    source="vLLM 0.33.0 models/llama.py:112; sglang 0.5.23 models/llama.py",
)
def activation_unknown(subject: Subject) -> Iterator[Found]:
    if subject.head is not None and subject.head.hidden_act != "silu":
        path = ".".join(subject.path("hidden_act"))
        yield Found(f"config.json: {path}", "silu", subject.head.hidden_act)


@rule(
    "RMS_EPS",
    "warning",
    "rms_norm_eps is not said, or far from the target's",
    story="Where the key is absent transformers takes 1e-6. Every norm of the draft adds this number; trainers take "
    "the target's, and another one shifts every state a little, unseen.",
    fix="write the value the head was trained with",
    source="transformers 5.24 `LlamaConfig`",
)
def rms_eps(subject: Subject) -> Iterator[Found]:
    if subject.head is None:
        return
    own, target = subject.settings.get("rms_norm_eps"), subject.target.rms_norm_eps if subject.target else None
    where = "config.json: " + ".".join(subject.path("rms_norm_eps"))
    if own is None:
        repair = Repair(set={subject.path("rms_norm_eps"): target}) if target else None
        yield Found(where, f"{target}, as the target" if target else "a number", "nothing, so 1e-06", repair=repair)
    elif target and type(own) is float and not 0.1 < own / target < 10:
        yield Found(where, f"about {target}, as the target", str(own))


@rule(
    "VERSION_UNREAD",
    "warning",
    "the rules were not read from this release",
    story="The rules rest on the sources of vLLM 0.10.2 to 0.33.0 and SGLang 0.5.10 to 0.5.23. Before and after them "
    "servers may do something else; what is said here is then what the nearest release does.",
    fix="check the server's own log at its start, or pass the version you serve with",
    source="specctl `records/runtimes.py`",
)
def version_unread(subject: Subject) -> Iterator[Found]:
    oldest, newest = OLDEST[subject.runtime], NEWEST[subject.runtime]
    if not oldest <= subject.version or subject.version[: len(newest)] > (*newest[:-1], 10**6):
        expected = f"{subject.runtime} {release(oldest)} to {release(newest)}"
        yield Found("--runtime-version", expected, release(subject.version))


@rule(
    "MODEL_TYPE_DIFFERS",
    "warning",
    "model_type is not that of the draft's layers",
    story="A config copied from the target keeps the target's model_type, and with it that family's defaults for "
    "every key that is not said: Qwen3 takes head_dim 128 where Llama divides, others know no attention_bias.",
    fix="write the model_type of the draft's own layers, and `head_dim` beside it",
    source="NVIDIA-NeMo/Automodel train_eagle3.py:606-672; Tencent/AngelSlim#138",
)
def model_type_differs(subject: Subject) -> Iterator[Found]:
    kind = subject.raw.get("model_type")
    own = subject.block
    if subject.is_speculators or not isinstance(kind, str) or kind == own or subject.head is None:
        return
    if kind not in MODEL_TYPES:
        return
    if any("Deepseek" in name for name in subject.classes):
        return
    repair = Repair(set={("model_type",): own, ("head_dim",): subject.head.head_dim})
    yield Found("config.json: model_type", own, kind, repair=repair)


RULES = rules_in(globals())

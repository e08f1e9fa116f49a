"""Rules on biases and on how weights are stored."""

from collections.abc import Iterator

from specctl.files.subject import SCALE_ENDINGS, Subject
from specctl.files.tensors import FLOATS
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.head import required_shapes


@rule(
    "BIAS_UNUSED",
    "error",
    "a bias that the runtime drops",
    story="EAGLE-1 heads have a bias on fc, heads of Qwen2 kind on q, k and v. vLLM skips a bias that has no "
    "parameter without a message, so the layer computes something else than it was trained to.",
    fix="set `attention_bias` (or `mlp_bias`) to true if the head was trained so; fc never takes a bias",
    source="vLLM 0.33.0 models/utils.py:458; sgl-project/sglang#5773",
)
def bias_unused(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None:
        return
    known = required_shapes(head)
    for name in sorted(subject.tensors):
        if name.endswith(".bias") and name not in known:
            key = "attention_bias" if "self_attn" in name else "mlp_bias" if ".mlp." in name else None
            expected = f"no bias, as `{key}` is not true" if key else "no bias on this layer"
            yield Found(subject.place(name), expected, f"`{subject.names[name]}`")


@rule(
    "BIAS_MISSING",
    "error",
    "config.json promises a bias that is not there",
    story="`attention_bias: true` copied from a Qwen2 target makes the runtime build biases for the draft's "
    "attention. Without tensors for them they stay uninitialised and are added to every query, key and value.",
    fix="set the flag to false, if the head was trained without",
    source="vLLM 0.33.0 models/llama_eagle3.py:85; vllm-project/vllm#22323",
)
def bias_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or not subject.tensors:
        return
    missing = [name for name in required_shapes(head) if name.endswith(".bias") and name not in subject.tensors]
    for flag, part in (("attention_bias", ".self_attn."), ("mlp_bias", ".mlp.")):
        names = [name for name in missing if part in name and int(name.split(".")[1]) in subject.layers]
        if names:
            wanted = sum(part in name for name in required_shapes(head) if name.endswith(".bias"))
            repair = Repair(set={(flag,): False}) if len(names) == wanted and not subject.is_speculators else None
            yield Found(f"config.json: {flag}", f"`{names[0]}` in the weights", "no such tensor", repair=repair)


@rule(
    "BIAS_KEY",
    "error",
    "`bias` makes layers that the file has no numbers for",
    story="EAGLE-1 heads say `bias: true` for their fc. vLLM builds a bias for o_proj by it and SGLang one for fc; "
    "without tensors for them they stay uninitialised.",
    fix="remove `bias` from config.json",
    source="vLLM 0.33.0 models/llama.py:268-271; sglang 0.5.23 models/llama_eagle3.py:163-167",
)
def bias_key(subject: Subject) -> Iterator[Found]:
    has = "fc.bias" in subject.tensors or any(name.endswith("o_proj.bias") for name in subject.tensors)
    if subject.raw.get("bias") and not has and subject.tensors:
        yield Found(
            "config.json: bias", "no such key", "true, and no bias in the weights", repair=Repair(unset=(("bias",),))
        )


@rule(
    "BIAS_VERSION",
    "error",
    "this vLLM drops the biases of the draft's attention",
    story="Before 0.16 vLLM builds the draft's q, k and v without bias whatever `attention_bias` says, and skips the "
    "tensors without a message.",
    fix="use vLLM 0.16 or newer",
    source="vLLM 0.16.0 models/llama_eagle3.py:56",
    needs=("vllm",),
    since="vLLM before 0.16",
)
def bias_version(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.attention_bias and subject.version < (0, 16):
        yield Found("config.json: attention_bias", "false with vLLM before 0.16", "true")


@rule(
    "BIAS_SGLANG",
    "error",
    "SGLang's draft attention has no bias",
    story="SGLang builds the draft's q, k and v without bias whatever config.json says, and skips the tensors.",
    fix="serve this head with vLLM",
    source="sglang 0.5.23 models/llama_eagle3.py",
    needs=("sglang",),
)
def bias_sglang(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.attention_bias and any(name.endswith("_proj.bias") for name in subject.tensors):
        yield Found("config.json: attention_bias", "false", "true")


@rule(
    "DTYPE_INTEGER",
    "error",
    "a weight is stored as whole numbers",
    story="Weights are floats. One that went through an integer cast, or a table under a weight's name, loads "
    "through a silent conversion and holds nothing.",
    fix="export the head again",
    source="vLLM 0.33.0 model_loader/weight_utils.py, default_weight_loader",
)
def dtype_integer(subject: Subject) -> Iterator[Found]:
    if subject.scales:
        return
    for name, entry in subject.tensors.items():
        if name not in ("d2t", "t2d") and entry.dtype not in FLOATS:
            yield Found(subject.place(name), "floats", f"dtype {entry.dtype}")


@rule(
    "DTYPE_MIXED",
    "note",
    "the weights have more than one float dtype",
    story="The runtime casts every tensor to the target's dtype. A head saved in two was cast in part on its way.",
    fix="none needed where the wider dtype is the trained one",
    source="vLLM 0.33.0 models/utils.py:324-339",
)
def dtype_mixed(subject: Subject) -> Iterator[Found]:
    kinds: dict[str, str] = {}
    for name, entry in subject.tensors.items():
        if entry.dtype in FLOATS and not name.endswith(SCALE_ENDINGS):
            kinds.setdefault(entry.dtype, name)
    if len(kinds) > 1 and not subject.scales:
        yield Found(
            "the weights", "one dtype", ", ".join(f"{dtype} (`{name}`)" for dtype, name in sorted(kinds.items()))
        )


RULES = rules_in(globals())

"""Rules on names: does each tensor have its place, and each place its tensor."""

from collections.abc import Iterator
from typing import Final

from specctl.files.serverview import bare, canonical, shape_text
from specctl.files.subject import SCALE_ENDINGS, Subject
from specctl.records.contract import Found, Level, Repair, rule, rules_in
from specctl.records.head import HeadConfig, optional_shapes, required_shapes
from specctl.records.runtimes import Version

OWN_RULES: Final = ("d2t", "t2d", "mask_hidden", "embed_tokens.weight", "lm_head.weight", "fc.weight")
"""Tensors whose absence or shape has a rule of its own."""

SGLANG_LAYERS_SINCE: Final[Version] = (0, 5, 12)
"""SGLang release that knows `layers.N.` beside `midlayer.`, and more than one of them."""


@rule(
    "NAME_PREFIX",
    "error",
    "tensor names carry a trainer's prefix",
    story="vLLM writes `model.` before every name of a draft, whatever it begins with. Names that already have it "
    "become model.model.*, which no module has, and the load stops. SGLang accepts `model.` and silently skips "
    "other prefixes.",
    fix="strip the prefix: `--fix`, or `specctl convert DRAFT OUT --to vllm`",
    source="vLLM 0.33.0 models/llama_eagle3.py:443-444; NVIDIA-NeMo/Automodel serve_vllm.py",
)
def name_prefix(subject: Subject) -> Iterator[Found]:
    allowed = ("model.",) if subject.runtime == "sglang" else ()
    prefixed = {
        name: bare(name)
        for name in subject.checkpoint.tensors
        if bare(name) != name and not (name.startswith(allowed) and bare(name) == name.split(".", 1)[1])
    }
    if prefixed:
        first = min(prefixed)
        is_clear = len({*prefixed.values()} | (set(subject.checkpoint.tensors) - set(prefixed))) == len(
            subject.checkpoint.tensors
        )
        yield Found(
            subject.place(next(k for k, v in subject.names.items() if v == first)),
            f"`{prefixed[first]}`",
            f"`{first}`, and {len(prefixed) - 1} more with a prefix" if len(prefixed) > 1 else f"`{first}`",
            repair=Repair(rename=prefixed) if is_clear else None,
        )


@rule(
    "NAME_LAYERS_SGLANG",
    "warning",
    "older SGLang knows the draft layer only as midlayer",
    story="Before 0.5.12 SGLang's draft has one layer called `midlayer`. Tensors called layers.0.* match no parameter "
    "and are skipped without a message; the layer runs on random numbers and nothing is accepted. Newer releases "
    "and vLLM read both names, so `midlayer.` is the one that works everywhere.",
    fix="rename `layers.0.` to `midlayer.`",
    source="sglang 0.5.11 and 0.5.12 models/llama_eagle3.py; vllm-project/speculators#360",
    needs=("sglang",),
    since="an error with SGLang before 0.5.12",
)
def name_layers_sglang(subject: Subject) -> Iterator[Found]:
    wrong = {
        spelled: "midlayer." + name.removeprefix("layers.0.")
        for name, spelled in subject.names.items()
        if name.startswith("layers.0.") and "midlayer." not in spelled
    }
    if wrong and subject.layers == (0,) and "speculators_config" not in subject.raw:
        first = min(wrong)
        level: Level | None = "error" if subject.version < SGLANG_LAYERS_SINCE else None
        found = f"`{first}`, and {len(wrong) - 1} more"
        yield Found("the weights", f"`{wrong[first]}`", found, level=level, repair=Repair(rename=wrong))


@rule(
    "NAME_TWICE",
    "error",
    "two names mean one tensor of the head",
    story="`midlayer.` and `layers.0.` are the same layer, and a prefix is stripped: two tensors then go to one place, "
    "and the one that is read last stays. Which that is depends on the order in the file.",
    fix="keep the tensors that were trained and drop the others",
    source="vLLM 0.33.0 models/llama_eagle3.py:290-299; sglang 0.5.23 models/llama_eagle3.py:337-342",
)
def name_twice(subject: Subject) -> Iterator[Found]:
    seen: dict[str, str] = {}
    twice = []
    for name in sorted(subject.checkpoint.tensors):
        first = seen.setdefault(canonical(name), name)
        if first != name:
            twice.append((first, name))
    if twice:
        more = f", and {len(twice) - 1} more such pairs" if len(twice) > 1 else ""
        yield Found("the weights", "one tensor for each place", f"`{twice[0][0]}` and `{twice[0][1]}`{more}")


@rule(
    "NAME_UNKNOWN",
    "error",
    "a tensor that no part of the head takes",
    story="vLLM stops at a name it has no parameter for. SGLang skips it without a word, which is worse: a renamed "
    "tensor is then missing from its place. `verifier_*` tables and optimizer states are left-overs of training.",
    fix="rename the tensor to what it is, or drop it if it belongs to training only",
    source="vLLM 0.33.0 models/utils.py:442-448; sglang 0.5.23 models/llama_eagle3.py:371-378",
)
def name_unknown(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None:
        return
    own = OWN_RULES if head.use_aux else set(OWN_RULES) - {"fc.weight"}
    known = {*required_shapes(head), *optional_shapes(head), *own}
    for name in sorted(subject.tensors):
        if name in known or name.endswith((*SCALE_ENDINGS, ".bias")) or _has_rule(name, head):
            continue
        if name.startswith("layers.") and not _is_layer_of(name, head.num_hidden_layers):
            continue  # LAYERS_COUNT speaks of it
        yield Found(subject.place(name), "a name of the head", f"`{subject.names[name]}`")


@rule(
    "TENSOR_MISSING",
    "error",
    "a tensor of the head is missing",
    story="The loaders of both runtimes complain about names they do not know and never about places that stay "
    "empty: vLLM's EAGLE-3 loader returns nothing, which switches its check off. A missing linear layer is "
    "uninitialised memory, a missing norm is all ones. The server starts, answers correctly and accepts nothing.",
    fix="export the head again; no repair can invent the tensor",
    source="vLLM 0.33.0 model_loader/default_loader.py:512-523; sgl-project/sglang#27908",
)
def tensor_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or not subject.tensors:
        return
    for name, shape in required_shapes(head).items():
        if name in subject.tensors or (name in OWN_RULES and name != "fc.weight"):
            continue
        if name.endswith(".bias") or name.startswith(("fc_norm.", "input_norm.")):
            continue
        if name.startswith("layers.") and int(name.split(".")[1]) not in subject.layers:
            continue
        yield Found("the weights", f"`{name}` {shape_text(shape)}", "no such tensor")


def _has_rule(name: str, head: HeadConfig) -> bool:
    """Norms without their flag are FC_NORM_UNFLAGGED and INPUT_NORM_UNFLAGGED."""
    is_state_norm = name.startswith("fc_norm.") and not head.fc_norm
    return is_state_norm or (name == "input_norm.weight" and not head.norm_before_fc)


def _is_layer_of(name: str, count: int) -> bool:
    index = name.split(".")[1]
    return index.isdecimal() and len(index) < 6 and int(index) < count


RULES = rules_in(globals())

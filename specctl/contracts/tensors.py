"""Rules on shapes and layers: does each tensor fit the sizes that config.json says."""

from collections.abc import Iterator
from typing import Final

from specctl.files.serverview import shape_text
from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.head import optional_shapes, required_shapes
from specctl.records.runtimes import Version

OWN_RULES: Final = ("d2t", "t2d", "mask_hidden", "embed_tokens.weight", "lm_head.weight", "fc.weight")
"""Tensors whose absence or shape has a rule of its own."""

MULTI_LAYER: Final[Version] = (0, 11, 1)
"""vLLM release that builds more than one draft layer."""

SGLANG_LAYERS_SINCE: Final[Version] = (0, 5, 12)
"""SGLang release that knows `layers.N.` beside `midlayer.`, and more than one of them."""


@rule(
    "SHAPE_WRONG",
    "error",
    "a tensor has another shape than config.json says",
    story="The shape follows from the sizes in config.json. The first layer reads embedding and hidden state side "
    "by side, so its q, k and v are 2 x hidden wide, deeper layers hidden wide; heads are head_dim rows each, which "
    "need not be hidden / heads.",
    fix="correct the size in config.json that does not fit, or export the head again",
    source="vLLM 0.33.0 models/llama_eagle3.py:82; vllm-project/speculators#134",
)
def shape_wrong(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None:
        return
    for name, shape in {**optional_shapes(head), **required_shapes(head)}.items():
        entry = subject.tensors.get(name)
        if entry is not None and name not in OWN_RULES and not name.startswith("rotary") and entry.shape != shape:
            yield Found(subject.place(name), shape_text(shape), shape_text(entry.shape))


@rule(
    "FC_WIDTH",
    "error",
    "fc does not fit the states it is fed",
    story="fc takes the target's states side by side: one block of `target_hidden_size` columns for each of the "
    "fused layers. Where the target is wider than the draft (70B: 8192 and 6144) the key must be written; readers "
    "take the draft's own width otherwise and stop at the shape, or fill a buffer of the wrong size.",
    fix="write `target_hidden_size` and `num_aux_hidden_states` as the head was trained",
    source="vLLM 0.33.0 models/llama_eagle3.py:209-221; vllm-project/vllm#18906, #26164",
)
def fc_width(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("fc.weight")
    if head is None or entry is None or not head.use_aux:
        return
    expected = (head.hidden_size, head.fc_width)
    if entry.shape != expected:
        how = f"{shape_text(expected)}: {head.num_aux} states of {head.target_hidden_size} columns"
        yield Found(
            subject.place("fc.weight"), how, shape_text(entry.shape), repair=_width_repair(subject, entry.shape)
        )


@rule(
    "LAYERS_COUNT",
    "error",
    "num_hidden_layers is not the number of layers there are",
    story="A config copied from the target keeps the target's depth. The runtime builds that many draft layers, "
    "loads the ones it finds, and runs the rest on uninitialised memory.",
    fix="set `num_hidden_layers` to the number of layers in the weights",
    source="NVIDIA-NeMo/Automodel 0.7.0 train_eagle3.py:606-672; vLLM 0.33.0 default_loader.py:512-514",
)
def layers_count(subject: Subject) -> Iterator[Found]:
    head, found = subject.head, subject.layers
    if head is None or not found or found == tuple(range(head.num_hidden_layers)):
        return
    is_whole = found == tuple(range(len(found)))
    # Only a number that is the target's tells that it is the config that is wrong and not the weights.
    is_copied = subject.layout == "nemo" or (
        subject.target is not None and head.num_hidden_layers == subject.target.num_layers
    )
    key = ("transformer_layer_config",) if subject.is_speculators else ()
    repair = Repair(set={(*key, "num_hidden_layers"): len(found)}) if is_whole and is_copied else None
    yield Found(
        "config.json: num_hidden_layers",
        f"{len(found)}, as in the weights" if is_whole else "layers numbered from 0 without a gap",
        f"{head.num_hidden_layers}, and layers {', '.join(map(str, found[:8]))} in the weights",
        repair=repair,
    )


@rule(
    "LAYERS_SGLANG",
    "error",
    "SGLang reads other norms in deeper layers",
    story="From the second layer on SGLang norms with `hidden_norm`, where vLLM and the trainers use "
    "`input_layernorm`. The norm it looks for is not in the file and stays all ones, the one in the file is skipped; "
    "neither is said. Before 0.5.12 it refuses more than one layer.",
    fix="serve this head with vLLM",
    source="sglang 0.5.23 models/llama_eagle3.py:103-105",
    needs=("sglang",),
)
def layers_sglang(subject: Subject) -> Iterator[Found]:
    if subject.head is None or subject.layers != tuple(range(subject.head.num_hidden_layers)):
        return
    lacking = [i for i in subject.layers[1:] if f"layers.{i}.hidden_norm.weight" not in subject.tensors]
    if lacking or (len(subject.layers) > 1 and subject.version < SGLANG_LAYERS_SINCE):
        yield Found("the weights", "one layer with SGLang", f"{len(subject.layers)} layers")


@rule(
    "LAYERS_OLD_VLLM",
    "error",
    "this vLLM builds one draft layer only",
    story="Older releases ignore `num_hidden_layers` of the draft and stop at the tensors of deeper layers.",
    fix="use vLLM 0.11.1 or newer",
    source="vLLM 0.11.0 and 0.11.1 models/llama_eagle3.py",
    needs=("vllm",),
    since="vLLM before 0.11.1",
)
def layers_old_vllm(subject: Subject) -> Iterator[Found]:
    if subject.version < MULTI_LAYER and len(subject.layers) > 1:
        yield Found("the weights", "one layer", f"{len(subject.layers)} layers")


def _width_repair(subject: Subject, shape: tuple[int, ...]) -> Repair | None:
    """Where the target's width is not said, the number of ids and fc's columns say it."""
    head = subject.head
    ids = subject.settings.get("eagle_aux_hidden_state_layer_ids")
    count = subject.settings.get("num_aux_hidden_states") or len(ids or ())
    if head is None or not count or subject.settings.get("target_hidden_size") is not None:
        return None
    if len(shape) != 2 or shape[0] != head.hidden_size or shape[1] % count:
        return None
    return Repair(set={("target_hidden_size",): shape[1] // count})


RULES = rules_in(globals())

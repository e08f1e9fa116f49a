"""Rules on lengths and windows."""

from collections.abc import Iterator
from typing import Final

from specctl.files.subject import Subject
from specctl.records.contract import Found, Level, Repair, rule, rules_in
from specctl.records.rope import FROM_LENGTH, ORIGINAL, both_spellings, rope_of

RAISED_SINCE: Final = (0, 27)
"""vLLM release that raises the draft's length to the target's."""


@rule(
    "MAX_POSITION_SHORT",
    "warning",
    "the draft's positions end before the target's",
    story="`max_position_embeddings` sizes the draft's table of rotations, and positions follow the target. Past "
    "its end older vLLM reads out of bounds: a device assert, or garbage. From 0.27 on vLLM raises the number, from "
    "0.33 on only for plain kinds of rope, and otherwise serves shorter contexts. SGLang refuses to start unless "
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 is set.",
    fix="raise `max_position_embeddings` to the target's; the rope parameters stay",
    source="vllm-project/vllm#48894; vLLM 0.27.0, 0.33.0 config/speculative.py; "
    "sglang 0.5.23 configs/model_config.py:1291-1316",
    needs=("target",),
    since="an error with vLLM before 0.27 and with SGLang",
)
def max_positionbrief(subject: Subject) -> Iterator[Found]:
    own = subject.settings.get("max_position_embeddings")
    target = subject.target.max_position_embeddings if subject.target is not None else None
    if type(own) is int and target is not None and own < target:
        is_fatal = subject.runtime == "sglang" or subject.version < RAISED_SINCE
        level: Level | None = "error" if is_fatal else None
        where = subject.key("max_position_embeddings")
        repair = _longer(subject, own, target)
        yield Found(where, f"{target}, as the target", str(own), level=level, repair=repair)


def _longer(subject: Subject, own: int, target: int) -> Repair | None:
    """The target's length, and the old one kept where the rope's frequencies come from it; None where they must."""
    said = {"max_position_embeddings": target}
    rope = rope_of(subject.settings)
    if rope is not None and rope["rope_type"] in FROM_LENGTH and rope.get(ORIGINAL) is None:
        is_plain = subject.settings.get(ORIGINAL) is None and rope.get("rope_theta") is not None
        if rope["rope_type"] == "dynamic" or not is_plain:
            return None
        said |= both_spellings({**rope, ORIGINAL: own})
    return Repair(set={subject.path(key): value for key, value in said.items()})


@rule(
    "MAX_POSITION_MISSING",
    "warning",
    "config.json does not say how many positions there are",
    story="Where the key is absent transformers takes 2048, and the table of rotations ends there.",
    fix="write the target's `max_position_embeddings`",
    source="transformers 5.24 `LlamaConfig`",
)
def max_position_missing(subject: Subject) -> Iterator[Found]:
    if subject.head is not None and subject.head.max_position_embeddings is None:
        target = subject.target.max_position_embeddings if subject.target is not None else None
        repair = Repair(set={subject.path("max_position_embeddings"): target}) if target else None
        expected = str(target) if target else "the target's number"
        yield Found(subject.key("max_position_embeddings"), expected, "nothing, so 2048", repair=repair)


@rule(
    "LAYER_TYPES_LENGTH",
    "error",
    "layer_types is not one per layer",
    story="A list copied from the target has one entry per layer of the target. vLLM indexes it by the draft's "
    "layer and transformers refuses a list of another length.",
    fix="write one entry per draft layer, or remove the key",
    source="vLLM 0.33.0 models/llama.py:178-204; vllm-project/speculators#182",
)
def layer_types_length(subject: Subject) -> Iterator[Found]:
    kinds, head = subject.settings.get("layer_types"), subject.head
    if isinstance(kinds, list) and head is not None and subject.layers == tuple(range(head.num_hidden_layers)):
        if len(kinds) == head.num_hidden_layers:
            return
        repair = None
        if set(kinds) == {"full_attention"}:
            repair = Repair(set={subject.path("layer_types"): ["full_attention"] * head.num_hidden_layers})
        yield Found(subject.key("layer_types"), f"{head.num_hidden_layers}", f"{len(kinds)} entries", repair=repair)


@rule(
    "SLIDING_WINDOW",
    "warning",
    "the draft has a sliding window",
    story="Runtimes differ in whether a draft's window is honoured. A head trained with one and served with full "
    "attention, or the other way round, changes acceptance by tens of percent with the length of the text. vLLM "
    "reads the window wherever `layer_types` says sliding_attention: where it is absent the load stops, where it is "
    "null the layer attends fully.",
    fix="set `sliding_window` to null, and `layer_types` to full_attention, if the head was trained on full attention",
    source="vllm-project/speculators#684; vLLM 0.33.0 models/llama.py:178-204",
    since="an error where `layer_types` has sliding_attention and there is no window",
)
def sliding_window(subject: Subject) -> Iterator[Found]:
    window, kinds = subject.settings.get("sliding_window"), subject.settings.get("layer_types")
    slides = isinstance(kinds, list) and "sliding_attention" in kinds
    if slides and type(window) is not int:
        found = "nothing" if window is None else repr(window)[:60]
        expected = "the window of the layers that `layer_types` calls sliding_attention"
        yield Found(subject.key("sliding_window"), expected, found, level="error")
        return
    # What `layer_types` says of a layer, vLLM does, whatever `use_sliding_window` says.
    is_off = subject.settings.get("use_sliding_window") is False and not slides
    if type(window) is int and not is_off:
        yield Found(subject.key("sliding_window"), "null, for full attention", str(window))


RULES = rules_in(globals())

"""Rules on the rotary base and its scaling, in both spellings."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.rope import (
    MULTIMODAL,
    both_spellings,
    differences,
    inverse_frequencies,
    is_per_attention_kind,
    new_spelling,
    old_spelling,
    rope_of,
)

PARTIAL: Final = ("partial_rotary_factor", "rotary_pct")
"""The share of a head that turns; vLLM takes the second name for the first (transformers_utils/config.py)."""

ROUNDED: Final = ("F16", "BF16")
"""A copy of the frequencies in 16 bits, as casting a whole head leaves it, tells nothing, and nobody reads it."""

NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "ntk": ("factor",),
    "proportional": (),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of rope that both servers know, and what each cannot do without."""


@rule(
    "ROPE_MISSING",
    "error",
    "config.json does not say the rotary base",
    story="Without `rope_theta` every reader takes 10000. Few targets use that, and a draft that was trained at "
    "500000 loses acceptance with each position; loss curves never showed it.",
    fix="write `rope_theta` as the head was trained, at the top and in `rope_parameters`",
    source="NVIDIA-NeMo/Automodel#2920; sgl-project/SpecForge#265",
)
def rope_missing(subject: Subject) -> Iterator[Found]:
    settings = subject.settings
    if not subject.checkpoint.has_config or subject.misfits or is_per_attention_kind(settings.get("rope_parameters")):
        return
    rope = rope_of(settings)
    if rope is None or rope.get("rope_theta") is None:
        yield Found(subject.key("rope_theta"), "the base the head was trained with", "nothing, so 10000")


@rule(
    "ROPE_INCOMPLETE",
    "error",
    "a scaled rope that is not whole",
    story="Each kind of scaling has numbers it cannot do without (llama3 four, yarn and linear a factor). transformers "
    "and vLLM stop at the first that is missing, with a KeyError that does not name the draft.",
    fix="copy the whole rope of the trainer's config",
    source="transformers 5.24 modeling_rope_utils.py; vLLM 0.33.0 layers/rotary_embedding/__init__.py",
)
def rope_incomplete(subject: Subject) -> Iterator[Found]:
    rope = rope_of(subject.settings)
    if subject.misfits or rope is None or is_per_attention_kind(subject.settings.get("rope_parameters")):
        return
    kind = rope["rope_type"]
    if not isinstance(kind, str) or kind not in NEEDED:
        yield Found(subject.key("rope_parameters"), f"one of {', '.join(NEEDED)}", f"rope_type {kind!r}")
        return
    lists = ("short_factor", "long_factor")
    for key in NEEDED[kind]:
        value = rope.get(key)
        found = "nothing" if value is None else repr(value)[:60]
        if key not in lists:
            if not _is_positive(value):
                yield Found(subject.key(f"rope_parameters.{key}"), f"a positive number, for rope_type {kind}", found)
            continue
        count = None if subject.head is None or _is_partial(subject.settings, rope) else subject.head.head_dim // 2
        is_right = isinstance(value, list) and all(map(_is_positive, value)) and len(value) == (count or len(value))
        if not is_right:
            what = "positive numbers" if count is None else f"{count} positive numbers, half of head_dim"
            found = f"{len(value)} entries" if isinstance(value, list) and all(map(_is_positive, value)) else found
            yield Found(subject.key(f"rope_parameters.{key}"), f"{what}, for rope_type {kind}", found)


@rule(
    "ROPE_CONTRADICTS",
    "error",
    "the two spellings of rope disagree",
    story="transformers 5 reads `rope_parameters`, older readers `rope_theta` and `rope_scaling`. When they say "
    "different things the head computes one thing in one runtime and another in the next.",
    fix="write the values the head was trained with in both spellings",
    source="NVIDIA-NeMo/Automodel#2920; vLLM 0.33.0 transformers_utils/config.py",
)
def rope_contradicts(subject: Subject) -> Iterator[Found]:
    old, new = old_spelling(subject.settings), new_spelling(subject.settings)
    if old is None or new is None or subject.misfits:
        return
    if not isinstance(subject.settings.get("rope_scaling"), Mapping):
        # transformers 4 and trainers write the flat theta beside full parameters; only theta is said twice.
        old, new = {"rope_theta": old.get("rope_theta")}, {"rope_theta": new.get("rope_theta")}
    for key in differences(old, new):
        if old.get(key) is not None and new.get(key) is not None:
            yield Found(subject.key(f"rope_parameters.{key}"), f"{old[key]}, as in the old spelling", f"{new[key]}")


@rule(
    "ROPE_ONE_SPELLING",
    "warning",
    "rope is said in one spelling only",
    story="Readers before transformers 5 look for `rope_theta` at the top and take 10000 where only "
    "`rope_parameters` says otherwise. SGLang and several trainers read the old spelling.",
    fix="write both spellings; `--fix` does",
    source="NVIDIA-NeMo/Automodel#2920; vllm-project/speculators#555, #574",
)
def rope_one_spelling(subject: Subject) -> Iterator[Found]:
    settings = subject.settings
    new = new_spelling(settings)
    if subject.misfits or new is None or new.get("rope_theta") is None or _has_mrope(settings):
        return
    has_scaling = isinstance(settings.get("rope_scaling"), Mapping) or new["rope_type"] == "default"
    if settings.get("rope_theta") is not None and has_scaling:
        return
    repair = Repair(set={subject.path(key): value for key, value in both_spellings(new).items()})
    missing = "rope_theta" if settings.get("rope_theta") is None else "rope_scaling"
    yield Found(
        subject.key(missing), f"the same as `rope_parameters`, theta {new['rope_theta']}", "nothing", repair=repair
    )


@rule(
    "ROPE_NESTED",
    "error",
    "rope is said per kind of attention",
    story="Targets with full and sliding layers keep one set of rope parameters for each. A draft's reader wants one "
    "flat set and fails with KeyError: 'rope_theta', or takes 10000.",
    fix="write the flat set of the kind the draft's layer is; `specctl convert --target` chooses it by `layer_types`",
    source="vllm-project/speculators#649; NVIDIA-NeMo/Automodel#3071",
)
def rope_nested(subject: Subject) -> Iterator[Found]:
    parameters = subject.settings.get("rope_parameters")
    if not is_per_attention_kind(parameters) or _has_mrope(subject.settings):
        return
    kinds = set(subject.settings.get("layer_types") or ())
    rope = new_spelling(subject.settings, kinds.pop()) if len(kinds) == 1 else None
    is_whole = rope is not None and rope.get("rope_theta") is not None
    repair = None
    if rope is not None and is_whole:
        repair = Repair(set={subject.path(key): value for key, value in both_spellings(rope).items()})
    found = f"one set for each of {', '.join(sorted(map(str, parameters or ())))}"
    yield Found(subject.key("rope_parameters"), "one flat set", found, repair=repair)


@rule(
    "ROPE_MROPE",
    "error",
    "the draft's rope is a multimodal one",
    story="A rope copied from a vision-language target brings `mrope_section`. Its presence alone switches vLLM to "
    "three position ids per token, which a text draft is not given.",
    fix="keep `rope_theta`, and remove `mrope_section`, `mrope_interleaved` and the type",
    source="vllm-project/speculators#598",
    needs=("vllm",),
)
def rope_mrope(subject: Subject) -> Iterator[Found]:
    if subject.misfits or not _has_mrope(subject.settings):
        return
    rope = rope_of(subject.settings)
    repair = None
    if rope is not None and rope.get("rope_theta") is not None:
        repair = Repair(set={subject.path(key): value for key, value in both_spellings(rope).items()})
    key = next(k for k in ("rope_parameters", "rope_scaling") if _is_mrope(subject.settings.get(k)))
    yield Found(subject.key(key), "a plain rope", "one with `mrope_section` or type mrope", repair=repair)


@rule(
    "ROPE_PARTIAL",
    "warning",
    "the draft rotates only a part of each head",
    story="`partial_rotary_factor` below one was copied from the target. Trainers' own attention and the runtimes' "
    "do not agree on which half is rotated; validation looks good and acceptance is near zero.",
    fix="train and serve drafts with the whole head rotated, or compare logits before serving",
    source="vllm-project/speculators#613",
)
def rope_partial(subject: Subject) -> Iterator[Found]:
    rope = rope_of(subject.settings) or {}
    said = {key: subject.settings.get(key, rope.get(key)) for key in PARTIAL}
    for key, factor in said.items():
        if isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor != 1:
            yield Found(subject.key(key), "1, or no such key", str(factor))
            return


@rule(
    "ROPE_DIFFERS",
    "warning",
    "the draft's rope is not the target's",
    story="A draft can be trained at another base than its target, and some published ones were, so this is legal. "
    "More often the key was lost on the way and 10000 stands in for it.",
    fix="check which base the head was trained with; making them equal by hand has cost acceptance before",
    source="wejoncy/sfllm#32; sgl-project/SpecForge#265",
    needs=("target",),
)
def rope_differs(subject: Subject) -> Iterator[Found]:
    target = subject.target.rope if subject.target is not None else None
    rope = rope_of(subject.settings)
    if target is None or rope is None or rope.get("rope_theta") is None or subject.misfits:
        return
    if is_per_attention_kind(subject.settings.get("rope_parameters")):
        return
    keys = differences(rope, target)
    if keys:
        where = subject.key("rope_theta" if "rope_theta" in keys else "rope_parameters")
        yield Found(where, f"{_told(target, keys)}, as the target", _told(rope, keys))


@rule(
    "ROPE_INV_FREQ",
    "error",
    "config.json and the trained frequencies disagree",
    story="specctl stores the inverse frequencies that training used beside the weights (both runtimes skip them). "
    "A config that was edited afterwards says another rotary base than the head learned.",
    fix="restore the `rope_theta` and scaling the head was trained with",
    source="wejoncy/sfllm#32",
)
def rope_inv_freq(subject: Subject) -> Iterator[Found]:
    head = subject.head
    name = next((n for n in subject.checkpoint.tensors if n.endswith("rotary_emb.inv_freq")), None)
    if head is None or name is None or not head.rope.get("rope_theta"):
        return
    expected = inverse_frequencies(head.rope, head.head_dim)
    stored = subject.values(name)
    if expected is None or stored is None or subject.checkpoint.tensors[name].dtype in ROUNDED:
        return
    if stored.shape != (len(expected),):
        yield Found(f"the weights: {name}", f"[{len(expected)}]", f"{list(stored.shape)}")
        return
    gap = max((abs(a - b) / b for a, b in zip(stored.tolist(), expected, strict=True)), default=0.0)
    if not gap <= 1e-5:
        theta = head.rope["rope_theta"]
        found = f"others: the largest ratio is {1 + gap:.3g}" if gap == gap else "numbers that are not finite"
        yield Found(f"the weights: {name}", f"those of rope_theta {theta}", found)


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9


def _is_partial(settings: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    return settings.get("partial_rotary_factor", rope.get("partial_rotary_factor")) not in (None, 1, 1.0)


def _told(rope: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """The settings of `rope` among `keys`."""
    return ", ".join(f"{key} {rope[key]}" for key in keys if rope.get(key) is not None) or "none of them"


def _has_mrope(settings: Mapping[str, Any]) -> bool:
    return _is_mrope(settings.get("rope_parameters")) or _is_mrope(settings.get("rope_scaling"))


def _is_mrope(rope: Any) -> bool:
    if not isinstance(rope, Mapping):
        return False
    return any(key in rope for key in MULTIMODAL) or "mrope" in (rope.get("type"), rope.get("rope_type"))


RULES = rules_in(globals())

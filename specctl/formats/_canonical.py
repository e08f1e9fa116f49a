"""From a layout's settings and tensors to a head in canonical terms. Every tensor is accounted for.

Nothing is made up: what is missing, unknown or of another shape is an error that lists it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from specctl.errors import InputError, NotSupportedError, UsageError
from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head
from specctl.files.regular import shown
from specctl.files.reorder import states_in_order
from specctl.files.tensors import Source, TensorEntry
from specctl.formats import _vocab
from specctl.formats._names import by_canonical_name, layer_count
from specctl.formats._settings import place
from specctl.records.head import DEFAULT_AUX_COUNT, Block, HeadConfig, optional_shapes, required_shapes
from specctl.records.headkeys import parse_head

DTYPE_NAMES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
TABLES: Final = ("d2t", "t2d")

_SCALES: Final = ("scale", "zero_point", "zeros", "qweight", "g_idx", "weight_packed", "amax")
_MOST_LISTED: Final = 6
_KEYS: Final = (
    ("q_norm", "`architectures` says which kind of layer: `Eagle3Qwen3ForCausalLM` norms queries and keys"),
    ("mlp.", "`mlp_bias` says whether the MLP has biases, `num_hidden_layers` how many layers there are"),
    ("bias", "`attention_bias` says whether the projections have biases; fc has none in an EAGLE-3 head"),
    ("input_norm", "`norm_before_fc` says whether there is a norm over the joined states"),
    ("fc_norm", "`fc_norm` says whether each state has a norm before fc"),
    ("mask_hidden", "`parallel_drafting` says whether the head has a learned mask (P-EAGLE)"),
    ("layers.", "`num_hidden_layers` says how many layers there are"),
    ("d2t", "export the head with the map from its own ids to the target's"),
)
"""Part of a tensor's name, and the key of config.json that it depends on."""


def head_from(
    checkpoint: Checkpoint,
    asked: Asked,
    settings: Mapping[str, Any],
    *,
    block: Block = "llama",
    ids: Sequence[int] | None,
    notes: Iterable[str],
    are_layers_counted: bool = False,
) -> Head:
    """The head of flat `settings`, its states in rising order, its rows by rising target id.

    `are_layers_counted` takes `num_hidden_layers` from the weights, where a trainer writes the target's.
    Raises InputError, NotSupportedError for quantised weights, UsageError for a P-EAGLE head without its id.
    """
    said = list(notes)
    tensors, buffers = by_canonical_name(checkpoint)
    said += [f"left out, as runtimes make them: {', '.join(map(shown, buffers[:4]))}"] if buffers else []
    _refuse_quantised(tensors)
    said += _untied(settings, tensors, checkpoint)
    counted = layer_count(tensors) if are_layers_counted else 0
    if counted and counted != settings.get("num_hidden_layers"):
        said.append(
            f"`num_hidden_layers` {settings.get('num_hidden_layers')} is the target's; the weights have {counted}"
        )
        settings = {**settings, "num_hidden_layers": counted, "layer_types": None}
    config = _config(checkpoint, settings, tensors, block=block, ids=ids)
    _require_fit(config, asked, checkpoint)
    tensors = _without_idle_norms(_with_flat_mask(tensors, config), config, said)
    _require_tensors(tensors, config, checkpoint)
    vocabulary = _vocab.ordered(checkpoint, tensors, config)
    changed: dict[str, Source] = dict(vocabulary.changed)
    if config.aux_ids is not None and list(config.aux_ids) != sorted(config.aux_ids):
        changed |= states_in_order(tensors, config.aux_ids, config.target_hidden_size)
        config = replace(config, aux_ids=tuple(sorted(config.aux_ids)))
        said.append(f"states sorted: columns of `fc` moved from the order {list(ids or ())} to a rising one")
    kept = {name: source for name, source in tensors.items() if name not in vocabulary.dropped}
    return Head(config, {**kept, **changed}, (*said, *vocabulary.notes))


def _config(
    checkpoint: Checkpoint,
    settings: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    *,
    block: Block,
    ids: Sequence[int] | None,
) -> HeadConfig:
    """The settings as a record, with what the tensors decide."""
    uses_aux = settings["eagle_config"]["use_aux_hidden_state"]
    flat = {**settings, "eagle_aux_hidden_state_layer_ids": list(ids) if ids and uses_aux else None}
    flat["num_aux_hidden_states"] = settings["num_aux_hidden_states"] if uses_aux else DEFAULT_AUX_COUNT
    if flat.get("parallel_drafting") is None:
        flat["parallel_drafting"] = "mask_hidden" in tensors
    if not flat["parallel_drafting"]:
        flat["mask_token_id"] = None
    elif flat.get("mask_token_id") is None:
        raise UsageError(
            "the head drafts in parallel (P-EAGLE), and config.json does not say the id of its reserved token",
            where=place(checkpoint),
            hint="give the id it was trained with as `--mask-token`; another one silently ruins acceptance",
        )
    flat.setdefault("dtype", None)
    if flat["dtype"] is None and flat.get("torch_dtype") is None:
        flat["dtype"] = _dtype(tensors)
    extra = flat.pop("extra")
    return parse_head(flat, block=block, where=place(checkpoint), extra=extra)


def _dtype(tensors: Mapping[str, TensorEntry]) -> str | None:
    entry = tensors.get("fc.weight") or tensors.get("norm.weight")
    return DTYPE_NAMES.get(entry.dtype) if entry is not None else None


def _refuse_quantised(tensors: Mapping[str, TensorEntry]) -> None:
    for name, entry in tensors.items():
        last = name.rpartition(".")[2]
        is_packed = entry.dtype not in DTYPE_NAMES and name not in TABLES
        if is_packed or any(part in last for part in _SCALES):
            raise NotSupportedError(
                f"`{shown(entry.name)}` ({entry.dtype}) belongs to a quantised head; no layout says how others read it",
                where=shown(str(entry.path)),
                hint="convert the head as it was before quantisation, and quantise the result",
            )


def _untied(settings: Mapping[str, Any], tensors: Mapping[str, TensorEntry], checkpoint: Checkpoint) -> list[str]:
    """A note where a tie is dropped that has no effect; NotSupportedError where readers disagree about it."""
    if not settings.get("tie_word_embeddings"):
        return []
    if "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
        raise NotSupportedError(
            "`tie_word_embeddings` is true and there is no `lm_head.weight`: transformers takes the draft's own "
            "embedding for it, vLLM and SGLang take tables of the target",
            where=place(checkpoint),
            hint="export the head with its own `lm_head.weight`",
        )
    return ["`tie_word_embeddings` true is written as false: a draft's head is its own or the target's"]


def _require_fit(config: HeadConfig, asked: Asked, checkpoint: Checkpoint) -> None:
    """Raises InputError where the settings contradict each other or the target."""
    if config.aux_ids is not None and len(config.aux_ids) != config.num_aux:
        raise InputError(
            f"{len(config.aux_ids)} layers are named and `num_aux_hidden_states` is {config.num_aux}",
            where=place(checkpoint),
        )
    if config.draft_vocab_size > config.vocab_size:
        raise InputError(
            f"`draft_vocab_size` {config.draft_vocab_size} is more than `vocab_size` {config.vocab_size}",
            where=place(checkpoint),
        )
    if config.parallel_drafting and not config.use_aux:
        raise NotSupportedError(
            "a P-EAGLE head with `use_aux_hidden_state` false has no fc, and no runtime runs it",
            where=place(checkpoint),
        )
    target = asked.target
    if target is None:
        return
    for key, theirs in (("vocab_size", target.vocab_size), ("target_hidden_size", target.hidden_size)):
        if getattr(config, key) != theirs:
            raise InputError(
                f"the head is made for a target with {key.removeprefix('target_')} {getattr(config, key)}; "
                f"`{shown(target.name)}` has {theirs}",
                where=place(checkpoint),
                hint="name the target it was trained for",
            )


def _with_flat_mask(tensors: Mapping[str, TensorEntry], config: HeadConfig) -> dict[str, TensorEntry]:
    """The learned mask as one row, whatever axes of size 1 stand before it."""
    found = dict(tensors)
    mask = found.get("mask_hidden")
    if mask is not None and math.prod(mask.shape) == config.fc_width and mask.shape[-1:] == (config.fc_width,):
        found["mask_hidden"] = replace(mask, shape=(1, config.fc_width))
    return found


def _without_idle_norms(
    tensors: dict[str, TensorEntry], config: HeadConfig, notes: list[str]
) -> dict[str, TensorEntry]:
    """Leave out `hidden_norm` of layers above 0, which take the hidden state alone and do not use it."""
    idle = [n for i in range(1, config.num_hidden_layers) if (n := f"layers.{i}.hidden_norm.weight") in tensors]
    notes += [f"left out, as no layer above the first uses it: {', '.join(idle)}"] if idle else []
    return {name: entry for name, entry in tensors.items() if name not in idle}


def _require_tensors(tensors: Mapping[str, TensorEntry], config: HeadConfig, checkpoint: Checkpoint) -> None:
    """Raises InputError unless the tensors are those of `config`, in their shapes."""
    required, optional = required_shapes(config), optional_shapes(config)
    unknown = sorted(name for name in tensors if name not in required and name not in {*optional, *TABLES})
    missing = sorted(name for name in required if name not in tensors and name != "d2t")
    shapes = {**optional, **required, "d2t": (config.draft_vocab_size,)}
    where = shown(str(checkpoint.folder))
    if unknown:
        named = _listed(tensors[name].name for name in unknown)
        raise InputError(f"no part of the head that config.json describes: {named}", where=where, hint=_key(unknown))
    if missing:
        raise InputError(f"missing: {_listed(missing)}", where=where, hint=_key(missing))
    wrong = [name for name, entry in sorted(tensors.items()) if entry.shape != shapes[name]]
    if wrong:
        says = [f"{name} {list(tensors[name].shape)} instead of {list(shapes[name])}" for name in wrong]
        raise InputError(
            f"not the shape that config.json says: {_listed(says, ticks=False)}",
            where=where,
            hint="its sizes are read from `hidden_size`, `target_hidden_size`, `num_aux_hidden_states`, `head_dim`, "
            "`vocab_size` and `draft_vocab_size`",
        )
    if "embed_tokens.weight" not in tensors and config.hidden_size != config.target_hidden_size:
        raise InputError(
            f"missing: `embed_tokens.weight`; the target's has width {config.target_hidden_size} and cannot stand in "
            f"for one of {config.hidden_size}",
            where=where,
        )


def _listed(names: Iterable[str], *, ticks: bool = True) -> str:
    shortened = [shown(name) for name in names]
    more = f" and {len(shortened) - _MOST_LISTED} more" if len(shortened) > _MOST_LISTED else ""
    return ", ".join(f"`{name}`" if ticks else name for name in shortened[:_MOST_LISTED]) + more


def _key(names: Sequence[str]) -> str | None:
    """Which key of config.json decides about the first of these tensors."""
    if names[0].endswith("bias"):
        return next(hint for part, hint in _KEYS if part in names[0])
    return next((hint for part, hint in _KEYS if part in names[0] and part not in ("mlp.", "bias")), None)

"""A target's folder by its headers: what its config says, and where its embedding and its head lie. No torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specctl.errors import InputError, TargetError
from specctl.files.checkpoint import Checkpoint, open_checkpoint
from specctl.files.inside import is_inside
from specctl.files.jsonfile import read_json
from specctl.files.regular import shown
from specctl.files.tensors import TensorEntry
from specctl.records.rope import is_per_attention_kind, rope_of
from specctl.records.target import TargetFacts, text_settings

GENERATION: Final = "generation_config.json"
EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "embeddings.weight", "word_embeddings.weight")
HEADS: Final = ("lm_head.weight", "embed_out.weight")
"""How the names of these tables end, in the order of trust."""

_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "vocab_size": ("vocab_size",),
}
DRAFT_MARKS: Final = ("hidden_norm.weight", "d2t", "mask_hidden")
"""Names that only drafts have."""

_PICTURES: Final = ("vision_config", "audio_config", "vision_tower", "visual")


@dataclass(frozen=True, slots=True)
class TargetFiles:
    """A target's facts and its two tables, [V, D] each; None where the folder holds no such weights."""

    facts: TargetFacts
    embedding: TensorEntry | None
    lm_head: TensorEntry | None


def read_target(path: Path, name: str | None = None) -> TargetFiles:
    """The target in a folder, from its configs and the headers of the shards that hold its two tables.

    `name` is what to call it in a checkpoint; a folder of the hub's cache is called by its hub id. A tied
    target's head is its embedding. Raises TargetError.
    """
    try:
        checkpoint = open_checkpoint(path, lambda name: name.endswith((*EMBEDDINGS, *HEADS, *DRAFT_MARKS)))
    except InputError as error:
        raise TargetError(
            f"the target cannot be read: {error.message}", where=error.where, hint="give the target's model folder"
        ) from error
    _require_config(checkpoint)
    if any(name.endswith(DRAFT_MARKS) for name in checkpoint.tensors):
        raise TargetError(
            "the target is a draft itself", where=shown(str(checkpoint.folder)), hint="give the large model's folder"
        )
    prefix, text = text_settings(checkpoint.config)
    facts = _facts(checkpoint, text, name or _hub_id(path) or str(path), is_nested=bool(prefix))
    shape = (facts.vocab_size, facts.hidden_size)
    embedding = _table(checkpoint.tensors, EMBEDDINGS, shape)
    head = _table(checkpoint.tensors, HEADS, shape)
    return TargetFiles(facts, embedding, embedding if head is None and facts.is_tied else head)


def _require_config(checkpoint: Checkpoint) -> None:
    if not checkpoint.has_config:
        problem = next(p for p in checkpoint.problems if p.where == "config.json")
        raise TargetError(
            f"the target's config.json cannot be used: {problem.found}", where=shown(str(checkpoint.folder))
        )


def _facts(checkpoint: Checkpoint, text: Mapping[str, Any], name: str, *, is_nested: bool) -> TargetFacts:
    raw = checkpoint.config
    architectures, dtype = raw.get("architectures"), _first(text, raw, keys=("dtype", "torch_dtype"))
    longest = text.get("max_position_embeddings")
    return TargetFacts(
        name=name,
        folder=str(checkpoint.folder),
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else "unknown",
        model_type=str(text.get("model_type") or raw.get("model_type") or "unknown"),
        num_layers=_size(checkpoint, text, "num_layers"),
        hidden_size=_size(checkpoint, text, "hidden_size"),
        vocab_size=_size(checkpoint, text, "vocab_size"),
        max_position_embeddings=longest if type(longest) is int and longest > 0 else None,
        rms_norm_eps=text["rms_norm_eps"] if type(text.get("rms_norm_eps")) is float else None,
        rope=_rope(text),
        eos_token_ids=tuple(
            sorted({*_ids(text.get("eos_token_id")), *_ids(raw.get("eos_token_id")), *_spoken(checkpoint)})
        ),
        is_tied=_first(text, raw, keys=("tie_word_embeddings",)) is True,
        dtype=str(dtype).removeprefix("torch.") if isinstance(dtype, str) else None,
        is_multimodal=is_nested or any(key in raw for key in _PICTURES),
    )


def _size(checkpoint: Checkpoint, text: Mapping[str, Any], what: str) -> int:
    for key in _SIZES[what]:
        value = text.get(key)
        if type(value) is int and 0 < value < 1 << 31:
            return value
    raise TargetError(
        f"the target's config.json does not say `{_SIZES[what][0]}` as a positive whole number",
        where=shown(str(checkpoint.folder)),
    )


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The flat rope; of full attention where the target has one per kind, as a draft attends fully."""
    kind = "full_attention" if is_per_attention_kind(text.get("rope_parameters")) else None
    return rope_of(text, kind)


def _spoken(checkpoint: Checkpoint) -> tuple[int, ...]:
    """The ids at which generation ends; a broken file of this kind says nothing about the draft."""
    if not is_inside(checkpoint.folder, GENERATION):
        return ()
    try:
        return _ids(read_json(checkpoint.folder / GENERATION)[0].get("eos_token_id"))
    except InputError:
        return ()


def _ids(value: Any) -> tuple[int, ...]:
    values: Iterable[Any] = value if isinstance(value, list) else (value,)
    return tuple(item for item in values if type(item) is int)


def _first(*settings: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((part[key] for part in settings for key in keys if part.get(key) is not None), None)


def _table(tensors: Mapping[str, TensorEntry], endings: tuple[str, ...], shape: tuple[int, int]) -> TensorEntry | None:
    """The tensor of that ending and shape; a vision tower's or an assistant's has another."""
    for ending in endings:
        found = [name for name in tensors if name == ending or name.endswith(f".{ending}")]
        fitting = sorted((name for name in found if tensors[name].shape == shape), key=lambda name: (len(name), name))
        if fitting:
            return tensors[fitting[0]]
    return None


def _hub_id(path: Path) -> str | None:
    """`owner/name` for a folder `models--owner--name/snapshots/<revision>` of the hub's cache."""
    for part in path.parts:
        if part.startswith("models--") and part.count("--") >= 2:
            return part.removeprefix("models--").replace("--", "/", 1)
    return None

"""From a head to the keys and tensors that layouts have in common; what is missing comes from the target."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specctl import __version__
from specctl.errors import NotSupportedError, UsageError
from specctl.files.head import Asked, Head
from specctl.files.tensors import Source, TensorEntry, chunks
from specctl.formats._aux import KEY, outputs
from specctl.formats._holds import Holds, require
from specctl.formats._settings import MARKER
from specctl.formats._vocab import whole_map
from specctl.records.head import HeadConfig
from specctl.records.rope import FROM_LENGTH, ORIGINAL, both_spellings

EMBEDDING: Final = "embed_tokens.weight"
LM_HEAD: Final = "lm_head.weight"


def fitted(head: Head, holds: Holds, asked: Asked) -> tuple[HeadConfig, dict[str, Source], list[str]]:
    """The settings and tensors (by canonical name) as the layout takes them, and notes.

    Raises NotSupportedError for what it cannot hold, UsageError where the target is needed.
    """
    require(head.config, holds, asked)
    notes: list[str] = []
    tensors = dict(head.tensors)
    _settle_embedding(head.config, tensors, notes, holds, asked)
    if holds.lm_head == "needed" and LM_HEAD not in tensors:
        tensors[LM_HEAD] = _from_target(asked.lm_head, LM_HEAD, head.config, holds, asked)
        notes.append(f"`{LM_HEAD}` taken from the target, whose head the draft shares")
    return _with_positions(head.config, asked, notes), tensors, notes


def plain_config(config: HeadConfig, layout: str, architecture: str) -> dict[str, Any]:
    """The keys that a config.json of Llama has, with those of EAGLE-3 that all readers share or ignore."""
    keys: dict[str, Any] = {
        **config.extra,
        "architectures": [architecture],
        "model_type": config.block,
        **layer_config(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
    }
    if config.use_aux:
        keys["num_aux_hidden_states"] = config.num_aux
        if config.aux_ids is not None:
            keys[KEY] = list(config.aux_ids)
    if config.num_draft_tokens is not None:
        keys["num_draft_tokens"] = config.num_draft_tokens
    return keys | {MARKER: mark(config, layout)}


def layer_config(config: HeadConfig) -> dict[str, Any]:
    """The sizes of the decoder layers, rope in both spellings, token ids."""
    eos = config.eos_token_id
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "max_position_embeddings": config.max_position_embeddings,
        **both_spellings(config.rope),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": False,
    }


def window_config(config: HeadConfig) -> dict[str, Any]:
    """Which layers slide, said for each, so that a target's window is not taken for the draft's."""
    return {
        "layer_types": list(config.layer_types or ("full_attention",) * config.num_hidden_layers),
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.layer_types is not None,
    }


def eagle_config(config: HeadConfig) -> dict[str, Any]:
    """The nested block: ids as outputs of layers, where they have such numbers, and the user's own keys."""
    block = {**config.extra.get("eagle_config", {}), "use_aux_hidden_state": config.use_aux}
    nested = outputs(config.aux_ids)
    return block if nested is None else {**block, KEY: nested}


def mark(config: HeadConfig, layout: str) -> dict[str, Any]:
    """By what specctl knows its own writing, and what the layout has no key for."""
    marker = {"layout": layout, "version": __version__}
    return marker if config.verifier is None else {**marker, "verifier": config.verifier}


def parallel_config(config: HeadConfig) -> dict[str, Any]:
    """What a P-EAGLE head adds: the reserved id under every key that vLLM has read (models before 0.28 know two)."""
    if not config.parallel_drafting:
        return {}
    keys = ("mask_token_id", "pard_token", "ptd_token_id")
    return {"parallel_drafting": True, **dict.fromkeys(keys, config.mask_token_id)}


def with_mask_axes(tensors: Mapping[str, Source], config: HeadConfig) -> dict[str, Source]:
    """The learned mask as trainers hold it, [1, 1, A * T]; its bytes are the same."""
    mask = tensors.get("mask_hidden")
    if mask is None:
        return dict(tensors)
    return {**tensors, "mask_hidden": replace(mask, shape=(1, 1, config.fc_width))}


def with_whole_map(tensors: Mapping[str, Source], config: HeadConfig) -> dict[str, Source]:
    """The tensors of a layout that has `d2t` and `t2d` for every vocabulary."""
    if config.is_reduced:
        return dict(tensors)
    d2t, t2d = whole_map(config.vocab_size)
    return {**tensors, "d2t": d2t, "t2d": t2d}


def _settle_embedding(
    config: HeadConfig, tensors: dict[str, Source], notes: list[str], holds: Holds, asked: Asked
) -> None:
    own = tensors.get(EMBEDDING)
    if holds.embedding == "needed" and own is None:
        tensors[EMBEDDING] = _from_target(asked.embedding, EMBEDDING, config, holds, asked)
        notes.append(f"`{EMBEDDING}` taken from the target, whose embedding the draft shares")
    is_wider = config.hidden_size != config.target_hidden_size
    if own is None or holds.embedding in ("any", "needed") or (holds.embedding == "wider" and is_wider):
        return
    if asked.embedding is None:
        raise UsageError(
            f"readers of {holds.title} take the target's embedding in place of the head's own `{EMBEDDING}`, and "
            "whether the two are equal is not known",
            hint="give `--target`, with its weights",
        )
    if not _are_equal(own, asked.embedding):
        raise NotSupportedError(
            f"{holds.title} cannot hold the head's own `{EMBEDDING}`, which differs from the target's: its readers "
            "would take the target's",
            hint="`--to vllm` or `--to speculators` hold it",
        )
    del tensors[EMBEDDING]
    notes.append(f"`{EMBEDDING}` left out: it equals the target's, byte for byte, which readers take")


def _from_target(table: TensorEntry | None, name: str, config: HeadConfig, holds: Holds, asked: Asked) -> TensorEntry:
    if asked.target is None:
        raise UsageError(
            f"{holds.title} needs `{name}`, which the head does not have: it shares the target's",
            hint="give `--target`, with its weights",
        )
    if table is None:
        raise NotSupportedError(
            f"{holds.title} needs `{name}`, which neither the head nor `{asked.target.name}` has",
            hint="give a `--target` folder with its weights",
        )
    if table.shape != (config.vocab_size, config.hidden_size):
        raise NotSupportedError(
            f"{holds.title} needs `{name}` of shape {[config.vocab_size, config.hidden_size]}; the target's has "
            f"{list(table.shape)}",
            hint="`--to vllm` can leave it out",
        )
    return table


def _with_positions(config: HeadConfig, asked: Asked, notes: list[str]) -> HeadConfig:
    """At least the target's length: the number sizes the table of positions, which follow the target's."""
    own, theirs = config.max_position_embeddings, asked.target.max_position_embeddings if asked.target else None
    if own is None and theirs is None:
        raise UsageError(
            "config.json does not say `max_position_embeddings`, and readers would take 2048",
            hint="give `--target`, whose length it has to have",
        )
    longest = max(own or 0, theirs or 0)
    if longest != own:
        trained = "" if own is None else f"; the head was trained with {own}"
        notes.append(f"`max_position_embeddings` raised to the target's {longest}{trained}")
    kept = own is not None and longest != own and config.rope.get("rope_type") in FROM_LENGTH
    if not kept or config.rope.get(ORIGINAL) is not None:
        return replace(config, max_position_embeddings=longest)
    if config.rope["rope_type"] == "dynamic":
        notes[-1:] = [f"`max_position_embeddings` stays {own}: its dynamic rope is made from it"]
        return config
    notes.append(f"`{ORIGINAL}` {own} is written, so that the rope stays as it is")
    return replace(config, max_position_embeddings=longest, rope={**config.rope, ORIGINAL: own})


def _are_equal(one: Source, other: Source) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return _digest(one) == _digest(other)


def _digest(source: Source) -> bytes:
    digest = hashlib.sha256()
    for piece in chunks(source):
        digest.update(piece)
    return digest.digest()

"""A fresh draft for a target: its settings, its first weights, and the served checkpoint it becomes.

From the target's config a draft takes sizes, rope and special tokens, and nothing about how the target is
stored or run: no quantization, no ties, no implementation, no code (vllm-project/vllm#66546).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specctl import plugins
from specctl.core.modules import DraftModel
from specctl.core.teaching import TargetParts, mapped
from specctl.errors import InputError, UsageError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.head import Asked, Head
from specctl.files.tensors import Source, Table, TensorEntry, read_array
from specctl.records.head import HeadConfig
from specctl.records.training import TrainConfig

DEFAULT_DRAFT_VOCAB = 32_000
EMBEDDING_ROWS = 8192
CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}
NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def fresh_head(config: TrainConfig, parts: TargetParts, aux_ids: Sequence[int], num_draft_tokens: int) -> HeadConfig:
    """The settings of a new head for the target. Raises UsageError where sizes do not fit together."""
    facts, text = parts.files.facts, parts.settings
    hidden = config.hidden_size or facts.hidden_size
    heads = config.num_attention_heads or _size(text, "num_attention_heads", "n_head") or max(1, hidden // 64)
    kv_heads = config.num_key_value_heads or _size(text, "num_key_value_heads") or heads
    head_dim = config.head_dim or _size(text, "head_dim") or max(2, hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise UsageError(
            f"a draft of {heads} heads, {kv_heads} key-value heads and head_dim {head_dim} cannot be: heads must be a "
            "multiple of key-value heads, and head_dim even"
        )
    vocab = min(config.draft_vocab_size or DEFAULT_DRAFT_VOCAB, facts.vocab_size)
    if config.draft_vocab_size is not None and config.draft_vocab_size > vocab:
        raise UsageError(f"`--draft-vocab-size {config.draft_vocab_size}` is not from 1 to the target's {vocab}")
    eos = facts.eos_token_ids
    return HeadConfig(
        block="llama",
        hidden_size=hidden,
        intermediate_size=config.intermediate_size or _size(text, "intermediate_size", "n_inner") or 4 * hidden,
        num_hidden_layers=config.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=vocab,
        target_hidden_size=facts.hidden_size,
        num_aux=len(aux_ids),
        aux_ids=tuple(aux_ids),
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        hidden_act="silu",
        rope=_rope(config, facts.rope),
        max_position_embeddings=facts.max_position_embeddings or _size(text, "n_positions", "max_seq_len"),
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=norms_before_fc(config),
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        parallel_drafting=config.parallel_drafting,
        mask_token_id=config.ptd_token_id if config.parallel_drafting else None,
        num_draft_tokens=num_draft_tokens,
        bos_token_id=text.get("bos_token_id") if type(text.get("bos_token_id")) is int else None,
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        dtype=facts.dtype or "float32",
        verifier=facts.name,
    )


def norms_before_fc(config: TrainConfig) -> bool:
    """Whether one norm runs over the fused states; EAGLE-3 drafts learn faster with it (docs/defaults.md)."""
    if config.norm_before_fc is not None:
        return config.norm_before_fc
    return not (config.parallel_drafting or config.fc_norm)


def fresh_model(
    head: HeadConfig, parts: TargetParts, vocabulary: torch.Tensor | None, config: TrainConfig
) -> DraftModel:
    """A model of `head` over `vocabulary`, with the target's embedding and head where the widths agree."""
    model = DraftModel(head, generator=torch.Generator().manual_seed(config.seed))
    if vocabulary is not None:
        model.set_vocabulary(vocabulary)
    if head.hidden_size == head.target_hidden_size:
        with torch.no_grad():
            model.embed_tokens.weight.copy_(parts.embedding)
            if config.init_head == "target":
                rows = parts.head if vocabulary is None else parts.head[vocabulary]
                model.lm_head.weight.copy_(rows)
    _freeze(model, config)
    return model


def _freeze(model: DraftModel, config: TrainConfig) -> None:
    """Leave what is not trained without gradients."""
    model.embed_tokens.weight.requires_grad_(trains_embedding(config, model.head))
    model.lm_head.weight.requires_grad_(config.train_head)


def trains_embedding(config: TrainConfig, head: HeadConfig) -> bool:
    """P-EAGLE's reserved row has to learn, and a table of another width starts from noise."""
    if config.train_embedding is not None:
        return config.train_embedding
    return config.parallel_drafting or head.hidden_size != head.target_hidden_size


def read_head(path: str, parts: TargetParts) -> Head:
    """A draft checkpoint of any layout, in canonical terms; no weights are read. Raises InputError."""
    checkpoint, files = open_checkpoint(Path(path)), parts.files
    asked = Asked(target=files.facts, embedding=files.embedding, lm_head=files.lm_head)
    return plugins.load_format(plugins.recognise(checkpoint) or "vllm").read(checkpoint, asked)


def warm_model(
    config: TrainConfig, head: HeadConfig, tensors: Mapping[str, torch.Tensor], parts: TargetParts
) -> DraftModel:
    """A model with the weights of an earlier draft; its vocabulary map stays.

    An embedding of its own is trained on. Raises InputError, UsageError for `train_embedding = false` with one:
    an embedding that is not trained is left to the target, and the draft's would be lost.
    """
    model = DraftModel(head, generator=torch.Generator().manual_seed(config.seed))
    state = dict(model.state_dict())
    found = {name: tensor for name, tensor in tensors.items() if name in state}
    if head.hidden_size == head.target_hidden_size:
        found.setdefault("embed_tokens.weight", parts.embedding.float())
    if not head.is_reduced:
        found.setdefault("lm_head.weight", parts.head.float())
    missing = sorted(set(state) - set(found))
    if missing:
        raise InputError(f"the draft to start from has no `{missing[0]}`", where=config.init_from)
    broken = [name for name, tensor in found.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise InputError(f"`{broken[0]}` of the draft to start from is not finite", where=config.init_from)
    model.load_state_dict({name: found[name].to(state[name].dtype).reshape(state[name].shape) for name in state})
    _freeze(model, config)
    if not model.embed_tokens.weight.requires_grad and not _is_targets(found["embed_tokens.weight"], parts):
        if config.train_embedding is False:
            raise UsageError(
                "the draft to start from has an embedding of its own, and `train_embedding = false` would leave it out",
                where=config.init_from,
                hint="leave `train_embedding` out",
            )
        model.embed_tokens.weight.requires_grad_(True)
    return model


def _is_targets(embedding: torch.Tensor, parts: TargetParts) -> bool:
    """Whether every row is the target's, compared a part at a time."""
    pairs = zip(torch.split(embedding, EMBEDDING_ROWS), torch.split(parts.embedding, EMBEDDING_ROWS), strict=True)
    return all(torch.equal(own, rows.float()) for own, rows in pairs)


def served_head(
    head: HeadConfig, state: Mapping[str, torch.Tensor], *, has_embedding: bool, inv_freq: torch.Tensor | None
) -> Head:
    """The head that a server loads: weights in the target's dtype, the map, and the frequencies it was trained with.

    An embedding that was not trained is the target's and is left to it.
    """
    dtype = NAMES.get(head.dtype or "", torch.float32)
    tensors: dict[str, Source] = {}
    for name, tensor in state.items():
        if name == "embed_tokens.weight" and not has_embedding:
            continue
        tensors[name] = to_table(tensor.to(dtype) if tensor.is_floating_point() else tensor)
    if inv_freq is not None:
        tensors["rotary_emb.inv_freq"] = to_table(inv_freq.float())
    return Head(head, tensors)


def to_table(tensor: torch.Tensor) -> Table:
    """A tensor's bytes, row-major."""
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Table(CODES[plain.dtype], tuple(plain.shape), data)


def to_tensor(source: Source) -> torch.Tensor:
    """A tensor of a checkpoint as fp32, integers and masks as they are."""
    if isinstance(source, TensorEntry) and source.dtype in ("BF16", "F16", "F32"):
        return mapped(source).float()
    array = read_array(source, 1 << 40)
    tensor = torch.from_numpy(array.copy())
    return tensor.float() if tensor.is_floating_point() else tensor


def _size(text: Mapping[str, Any], *keys: str) -> int | None:
    return next((text[key] for key in keys if type(text.get(key)) is int and text[key] > 0), None)


def _rope(config: TrainConfig, rope: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config.rope_theta is not None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    if rope is None or rope.get("rope_theta") is None:
        raise UsageError(
            "the target's config says no `rope_theta`, so the draft's cannot follow it",
            hint="pass it in the config file, as in `rope_theta = 10000.0`",
        )
    theta = rope["rope_theta"]
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise UsageError(
            f"the target's config says `rope_theta` {theta!r}, which is no number above 0",
            hint="correct it there, or pass it in the config file, as in `rope_theta = 10000.0`",
        )
    # A draft rotates its whole head: runtimes disagree about partial rotation (vllm-project/speculators#613).
    return {key: value for key, value in rope.items() if key != "partial_rotary_factor"}

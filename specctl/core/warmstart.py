"""Training that starts from an earlier draft, of whatever layout it is."""

from __future__ import annotations

from dataclasses import replace

from specctl.core import headmaking
from specctl.core.modules import DraftModel
from specctl.core.teaching import TargetParts
from specctl.errors import UsageError
from specctl.records.head import HeadConfig
from specctl.records.training import TrainConfig

KEPT = ("num_draft_tokens", "aux_ids", "num_aux", "max_position_embeddings", "dtype", "verifier")
"""Settings that follow the run instead of the earlier draft."""


SHAPE = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    "draft_vocab_size",
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
)
"""Settings that are the earlier draft's; a run that asks for others would not get them."""


def warm_start(config: TrainConfig, head: HeadConfig, parts: TargetParts) -> DraftModel:
    """The model of `config.init_from` with its own shape and vocabulary map.

    Raises UsageError when it reads other layers, drafts in another way or has another shape than the run asks for.
    """
    assert config.init_from is not None
    earlier = headmaking.read_head(config.init_from, parts)
    found = earlier.config
    if found.aux_ids is not None and found.aux_ids != head.aux_ids:
        raise UsageError(
            f"the draft to start from reads boundaries {list(found.aux_ids)} and the shards give "
            f"{list(head.aux_ids or ())}",
            where=config.init_from,
            hint="name its layers with `--layers`",
        )
    if found.parallel_drafting != head.parallel_drafting:
        kind = "a P-EAGLE" if found.parallel_drafting else "an EAGLE-3"
        raise UsageError(f"the draft to start from is {kind} head", where=config.init_from)
    if config.init_head != "target":
        raise UsageError("`init_head` has no meaning for a draft that brings its head", where=config.init_from)
    _require_same(config, found)
    kept = {key: getattr(head, key) for key in KEPT}
    tensors = {name: headmaking.to_tensor(source) for name, source in earlier.tensors.items()}
    return headmaking.warm_model(config, replace(found, **kept), tensors, parts)


def _require_same(config: TrainConfig, found: HeadConfig) -> None:
    """Raises UsageError where the run asks for what the draft to start from is not."""
    asked = {key: getattr(config, key) for key in SHAPE if getattr(config, key)}
    asked |= {"num_hidden_layers": config.num_layers} if config.num_layers != 1 else {}
    asked |= {"mask_token_id": config.ptd_token_id} if config.parallel_drafting else {}
    for key, value in asked.items():
        if getattr(found, key) != value:
            raise UsageError(
                f"the draft to start from has `{key}` {getattr(found, key)}, and the run asks for {value}",
                where=config.init_from,
                hint="leave the setting to the draft, or start afresh",
            )
    if config.rope_theta is not None and dict(found.rope) != {"rope_type": "default", "rope_theta": config.rope_theta}:
        raise UsageError(
            f"the draft to start from has the rope {dict(found.rope)}, and the run asks for theta {config.rope_theta}",
            where=config.init_from,
            hint="leave `rope_theta` out",
        )

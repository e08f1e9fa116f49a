"""Training that starts from an earlier draft, of whatever layout it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specctl import plugins
from specctl.core import headmaking
from specctl.core.modules import DraftModel
from specctl.core.teaching import TargetParts
from specctl.errors import UsageError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.head import Asked
from specctl.records.head import HeadConfig
from specctl.records.training import TrainConfig

KEPT = ("num_draft_tokens", "aux_ids", "num_aux", "max_position_embeddings", "dtype", "verifier")
"""Settings that follow the run instead of the earlier draft."""


def warm_start(config: TrainConfig, head: HeadConfig, parts: TargetParts) -> DraftModel:
    """The model of `config.init_from` with its own shape and vocabulary map.

    Raises UsageError when it reads other layers or drafts in another way than the run asks for.
    """
    assert config.init_from is not None
    checkpoint = open_checkpoint(Path(config.init_from))
    layout = plugins.recognise(checkpoint) or "vllm"
    asked = Asked(aux_ids=None, target=parts.files.facts, embedding=parts.files.embedding, lm_head=parts.files.lm_head)
    found, tensors = headmaking.load_head(config.init_from, layout, asked)
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
    kept = {key: getattr(head, key) for key in KEPT}
    return headmaking.warm_model(config, replace(found, **kept), tensors, parts)

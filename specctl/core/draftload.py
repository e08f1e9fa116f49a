"""A draft checkpoint of any layout as a model that proposes for its target."""

from __future__ import annotations

from pathlib import Path

import torch

from specctl import plugins
from specctl.core.headmaking import load_head
from specctl.core.modules import DraftModel
from specctl.core.teaching import TargetParts
from specctl.errors import InputError, UsageError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.head import Asked
from specctl.records.head import HeadConfig


def read_draft(path: str, parts: TargetParts) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """A draft's settings and tensors by canonical name. Raises InputError for a folder that is no draft."""
    layout = plugins.recognise(open_checkpoint(Path(path))) or "vllm"
    files = parts.files
    asked = Asked(aux_ids=None, target=files.facts, embedding=files.embedding, lm_head=files.lm_head)
    head, tensors = load_head(path, layout, asked)
    if head.target_hidden_size != files.facts.hidden_size or head.vocab_size != files.facts.vocab_size:
        raise UsageError(
            f"the draft is for a target of hidden size {head.target_hidden_size} and {head.vocab_size} tokens, "
            f"and this one has {files.facts.hidden_size} and {files.facts.vocab_size}",
            where=path,
            hint="`specctl check-ckpt --target` says all that does not fit",
        )
    return head, tensors


def draft_slots(head: HeadConfig, path: str) -> tuple[str, ...]:
    """The target's states that a draft takes. Raises UsageError for a draft that does not say."""
    if not head.use_aux:
        return ("norm",)
    if head.aux_ids is None:
        raise UsageError(
            "the draft does not say which of the target's layers it reads",
            where=path,
            hint="`specctl check-ckpt` names the key; guessing would measure another draft",
        )
    return tuple(map(str, head.aux_ids))


def build_draft(
    head: HeadConfig, tensors: dict[str, torch.Tensor], parts: TargetParts, *, dtype: torch.dtype, device: torch.device
) -> DraftModel:
    """The model in `dtype` on `device`; what a checkpoint leaves to the target is read from the target's files.

    Raises InputError for a checkpoint with a tensor missing.
    """
    model = DraftModel(head)
    state, found = model.state_dict(), dict(tensors)
    if head.hidden_size == head.target_hidden_size:
        found.setdefault("embed_tokens.weight", parts.embedding)
        if not head.is_reduced:
            found.setdefault("lm_head.weight", parts.head)
    missing = sorted(set(state) - set(found))
    if missing:
        raise InputError(f"the draft has no `{missing[0]}`", hint="`specctl check-ckpt` says what a server does then")
    model.load_state_dict({name: found[name].to(old.dtype).reshape(old.shape) for name, old in state.items()})
    return model.requires_grad_(False).eval().to(device=device, dtype=dtype)

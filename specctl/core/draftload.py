"""A draft checkpoint of any layout as a model that proposes for its target."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from specctl.core.headmaking import read_head, to_tensor
from specctl.core.modules import DraftModel
from specctl.core.teaching import TargetParts
from specctl.errors import InputError, UsageError
from specctl.files.tensors import Source, TensorEntry
from specctl.records.head import HeadConfig


def read_draft(path: str, parts: TargetParts) -> tuple[HeadConfig, Mapping[str, Source]]:
    """A draft's settings and where its tensors lie, by canonical name; no weights are read.

    Raises InputError for a folder that is no draft, is one for another target, or lacks a tensor.
    """
    head = read_head(path, parts)
    return head.config, head.tensors


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
    head: HeadConfig, tensors: Mapping[str, Source], parts: TargetParts, *, dtype: torch.dtype, device: torch.device
) -> DraftModel:
    """The model in `dtype` on `device`; what a checkpoint leaves to the target is read from the target's files.

    Raises InputError for a tensor that is missing or not finite.
    """
    model = DraftModel(head)
    state = model.state_dict()
    with torch.no_grad():
        for name, own in state.items():
            own.copy_(_tensor(name, head, tensors, parts).reshape(own.shape))
    return model.requires_grad_(False).eval().to(device=device, dtype=dtype)


def _tensor(name: str, head: HeadConfig, tensors: Mapping[str, Source], parts: TargetParts) -> torch.Tensor:
    """The draft's own tensor, else the table of the target that a server takes for it."""
    if name in tensors:
        source = tensors[name]
        tensor = to_tensor(source)
        if not bool(torch.isfinite(tensor).all()):
            where = str(source.path) if isinstance(source, TensorEntry) else None
            raise InputError(f"`{name}` of the draft is not finite", where=where, hint="it was saved after it diverged")
        return tensor
    if head.hidden_size == head.target_hidden_size:
        if name == "embed_tokens.weight":
            return parts.embedding
        if name == "lm_head.weight" and not head.is_reduced:
            return parts.head
    raise InputError(f"the draft has no `{name}`", hint="`specctl check-ckpt` says what a server does then")

"""Recomputes stored states by another road and compares: the proof that a folder means what it says.

The reference is the plain transformers forward with `output_hidden_states` of the batch that a sample
was in, not the hooks that made the folder: on the same machine it gives the same bits. Logits are
rebuilt by the model's own head, with the stored state put where the head reads, so that soft caps and
scales are the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from specctl.core.capture import forward_options
from specctl.core.decoder import stream_of
from specctl.core.lengths import forget_lengths
from specctl.core.target import LoadedTarget
from specctl.errors import TargetError
from specctl.records.layers import NORM
from specctl.records.shard import SlotArray

MIN_COSINE: Mapping[str, float] = {"float32": 1 - 1e-6, "bfloat16": 0.99, "float16": 0.999}
"""What rounding leaves of a cosine at the worst token, by dtype; the same angle bounds the length of a difference."""


@dataclass(frozen=True, slots=True)
class SlotMatch:
    """How well one slot agrees: worst cosine over tokens, largest absolute difference, and the largest length of a
    token's difference as a share of its state's. A cosine alone does not see a scale.
    """

    slot: str
    min_cosine: float
    max_difference: float
    max_relative: float
    is_equal: bool

    def is_near(self, dtype: str) -> bool:
        """Whether rounding of this dtype explains the difference; NaN is not explained."""
        least = MIN_COSINE[dtype]
        return self.min_cosine >= least and self.max_relative <= math.sqrt(2 * (1 - least))

    def text(self) -> str:
        """For a table cell."""
        if self.is_equal:
            return "bit-equal"
        return (
            f"cosine >= {self.min_cosine:.6f}, largest difference {self.max_difference:.3g}, "
            f"{self.max_relative:.2%} of a state"
        )


def worse(first: SlotMatch | None, second: SlotMatch) -> SlotMatch:
    """What holds over both of one slot: the smaller cosine, the larger difference, NaN before all."""
    if first is None:
        return second
    return SlotMatch(
        second.slot,
        float(np.minimum(first.min_cosine, second.min_cosine)),
        float(np.maximum(first.max_difference, second.max_difference)),
        float(np.maximum(first.max_relative, second.max_relative)),
        first.is_equal and second.is_equal,
    )


def to_torch(states: SlotArray, dtype: str) -> torch.Tensor:
    """A tensor from a store's array; bfloat16 comes as its uint16 bits."""
    tensor = torch.from_numpy(states.copy())
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def match(slot: str, found: torch.Tensor, expected: torch.Tensor) -> SlotMatch:
    """Compare [T, D] with [T, D], by the worst token, never the mean."""
    a, b = found.double(), expected.double()
    lengths, gaps = b.norm(dim=-1), (a - b).norm(dim=-1)
    relative = torch.where(gaps > 0, gaps / lengths.clamp_min(1e-300), gaps)
    norms = a.norm(dim=-1) * lengths
    cosine = torch.where(norms > 0, (a * b).sum(-1) / norms.clamp_min(1e-300), (a == b).all(-1).double())
    largest, is_equal = float((a - b).abs().max()), bool(torch.equal(found, expected))
    return SlotMatch(slot, float(cosine.min()), largest, float(relative.max()), is_equal)


@torch.inference_mode()
def reference_states(
    target: LoadedTarget, ids_BT: torch.Tensor, row: int, length: int, slots: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Each slot [length, D] of one row as plain transformers gives it, final-norm convention translated.

    `hidden_states[b]` is boundary b for b < N and the normed state for b = N; boundary N itself is
    not in that list and is left out. State-space models (Mamba, RWKV) list no boundary 0: all others stand one
    place earlier, and N is there. `norm` is always there when the model returns states at all.
    """
    forget_lengths(target.model)
    left: list[torch.Tensor | None] = []

    def note(_layer: nn.Module, _args: Any, output: Any) -> None:
        left.append(stream_of(output))

    handle = target.decoder.layers[0].register_forward_hook(note)
    try:
        output = target.decoder.caller(
            input_ids=ids_BT.to(target.device), output_hidden_states=True, **forward_options(target.decoder.caller)
        )
    finally:
        handle.remove()
    hidden = getattr(output, "hidden_states", None)
    if hidden is None:
        return {}
    num_layers = target.spec.num_layers
    first = left[0] if left else None
    shift = int(first is not None and torch.equal(hidden[0], first))
    boundaries = range(shift, num_layers + shift)
    kept = {slot: int(slot) - shift for slot in slots if slot != NORM and int(slot) in boundaries} | {NORM: num_layers}
    return {slot: hidden[index][row, :length].cpu() for slot, index in kept.items() if index < len(hidden)}


@torch.inference_mode()
def logit_gaps(
    target: LoadedTarget, input_ids: torch.Tensor, own_final: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Mean absolute log-probability difference between the logits of the model's own final states
    [T, D] and those rebuilt from the stored `norm` and, through the final norm, from the stored last
    boundary."""
    ids = input_ids[None].to(target.device)
    last = str(target.spec.num_layers)
    finals = {NORM: states[NORM].to(target.device)} if NORM in states else {}
    if last in states:
        finals["last"] = stream_or_raise(final_norm(target)(states[last].to(target.device)[None]))[0]
    if not finals:
        return {}
    own = _logits_with(target, ids, own_final.to(target.device))
    return {name: float((_logits_with(target, ids, final) - own).abs().mean()) for name, final in finals.items()}


@torch.inference_mode()
def final_norm(target: LoadedTarget) -> Callable[[torch.Tensor], Any]:
    """The module that takes the last boundary to what the head reads, found by running a probe.

    Raises TargetError when no direct part of the decoder does that.
    """
    seen: list[tuple[nn.Module, torch.Tensor | None, torch.Tensor | None]] = []
    last: dict[str, torch.Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        seen.append((module, stream_of(args), stream_of(output)))

    def note_last(_module: nn.Module, _args: Any, output: Any) -> None:
        stream = stream_of(output)
        assert stream is not None
        last["out"] = stream.clone()

    caller = target.decoder.caller
    handles = [m.register_forward_hook(note) for m in caller.children() if m is not target.decoder.layers]
    handles.append(target.decoder.layers[-1].register_forward_hook(note_last))
    try:
        output = caller(input_ids=torch.arange(1, 5, device=target.device)[None], **forward_options(caller))
    finally:
        for handle in handles:
            handle.remove()
    final = stream_or_raise(output)
    for module, entered, left in seen:
        if entered is not None and left is not None and torch.equal(left, final) and torch.equal(entered, last["out"]):
            return module
    if torch.equal(last["out"], final):
        return nn.Identity()
    raise TargetError(f"no part of `{type(caller).__name__}` takes the last layer's output to the head's input")


def stream_or_raise(value: Any) -> torch.Tensor:
    """The stream in a module's output. Raises TargetError when there is none."""
    stream = stream_of(value)
    if stream is None:
        raise TargetError("the model returned no hidden states")
    return stream


def _logits_with(target: LoadedTarget, ids: torch.Tensor, final_TD: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [T, V] that the model's own head gives to the state put in its way."""

    def replace(_head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (final_TD[None].to(args[0].dtype), *args[1:])

    head = target.model.get_output_embeddings()  # type: ignore[operator]
    if head is None:
        raise TargetError(f"`{type(target.model).__name__}` names no output head")
    handle = head.register_forward_pre_hook(replace)
    try:
        logits: torch.Tensor = target.model(input_ids=ids, **forward_options(target.model)).logits[0]
    finally:
        handle.remove()
    return logits.float().log_softmax(-1)

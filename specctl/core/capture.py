"""Records the residual stream at layer boundaries while a target runs. Knows hooks, not files.

Boundary 0 is the input of decoder layer 0, b the output of layer b-1, `norm` what the head reads.
Hooks sit on the layers themselves, so the implementation of the target, `output_hidden_states` and
whether the caller passed `input_ids` or `inputs_embeds` do not matter (vllm-project/vllm#66546).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from specctl.core.decoder import Decoder, input_stream, is_placeholder, stream_of
from specctl.errors import TargetError
from specctl.records.layers import NORM

Sink = Callable[[str, torch.Tensor], None]
"""Receives a slot and the live tensor; it must copy what it keeps before it returns."""


def owned_slots(slots: Sequence[str], owned: range, *, is_last_stage: bool) -> tuple[str, ...]:
    """Of `slots`, those that a stage with the layers `owned` records.

    Boundary b > 0 belongs to the stage of layer b-1, boundary 0 to that of layer 0, `norm` to the
    last stage. Every slot has one owner.
    """
    return tuple(s for s in slots if (is_last_stage if s == NORM else max(int(s) - 1, 0) in owned))


@contextmanager
def record(decoder: Decoder, slots: Sequence[str], sink: Sink, *, model: nn.Module) -> Iterator[None]:
    """Send each slot to `sink` at every forward while the context is open.

    `slots` must be owned here. The sink sees the tensor before the model can overwrite it in place.
    """
    handles: list[Any] = []
    try:
        for slot in slots:
            handles.append(_attach(decoder, slot, sink, model))
        yield
    finally:
        for handle in handles:
            handle.remove()


class Recorder:
    """A sink that keeps a copy of each slot of the last forward."""

    def __init__(self) -> None:
        self.states: dict[str, torch.Tensor] = {}

    def __call__(self, slot: str, stream: torch.Tensor) -> None:
        # A clone: the next layer may add to this very tensor in place.
        self.states[slot] = stream.detach().clone()

    def take(self, slots: Sequence[str], model: nn.Module) -> dict[str, torch.Tensor]:
        """The states of one forward, in the order of `slots`; raises TargetError when one is missing."""
        states, self.states = self.states, {}
        require_all(slots, states, model)
        return {slot: states[slot] for slot in slots}


def require_all(slots: Sequence[str], seen: dict[str, Any], model: nn.Module) -> None:
    """Raises TargetError when a slot was not recorded: the model went round its own layers."""
    missing = [slot for slot in slots if slot not in seen]
    if missing:
        raise TargetError(
            f"`{type(model).__name__}` returned no hidden states for slot `{missing[0]}`",
            hint="its forward does not call the decoder layers it lists, so nothing was recorded",
        )


def _attach(decoder: Decoder, slot: str, sink: Sink, model: nn.Module) -> Any:
    if slot == NORM:
        return _attach_norm(decoder, sink, model)
    boundary = int(slot)
    layer = decoder.layers[max(boundary - 1, 0)]
    assert not is_placeholder(layer), (slot, decoder.owned)
    if boundary == 0:

        def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _send(sink, slot, input_stream(args, kwargs), layer)

        return layer.register_forward_pre_hook(before, with_kwargs=True)

    def after(_layer: nn.Module, _args: Any, output: Any) -> None:
        _send(sink, slot, stream_of(output), layer)

    return layer.register_forward_hook(after)


def _attach_norm(decoder: Decoder, sink: Sink, model: nn.Module) -> Any:
    head = model.get_output_embeddings() if decoder.caller is model else None  # type: ignore[operator]
    if decoder.caller is model:
        if head is None:
            raise TargetError(f"`{type(model).__name__}` names no output head, so the slot `norm` is not known")

        def before_head(_head: nn.Module, args: tuple[Any, ...]) -> None:
            _send(sink, NORM, stream_of(args), decoder.caller)

        return head.register_forward_pre_hook(before_head)

    def after(_caller: nn.Module, _args: Any, output: Any) -> None:
        _send(sink, NORM, stream_of(output), decoder.caller)

    return decoder.caller.register_forward_hook(after)


def _send(sink: Sink, slot: str, stream: torch.Tensor | None, layer: nn.Module) -> None:
    if stream is None:
        raise TargetError(
            f"slot `{slot}`: `{type(layer).__name__}` gave no floating-point tensor, so there are no hidden states"
        )
    sink(slot, stream)


def forward_options(caller: nn.Module) -> dict[str, Any]:
    """No cache is kept: nothing is generated. A model's own code may not know the option."""
    return {"use_cache": False} if "use_cache" in inspect.signature(caller.forward).parameters else {}

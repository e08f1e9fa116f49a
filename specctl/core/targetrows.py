"""The target's forward over rows that advance at their own pace, on one rank: whole, or a pipeline stage of it.

A stage takes the stream and the states recorded before it in one message, and hands on one. Legend:
B rows, Q new positions a row, D hidden size, A*D aux width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from specctl.core.capture import Recorder, owned_slots, record
from specctl.core.lengths import forget_lengths
from specctl.core.logits import logit_rule, makes_logits
from specctl.core.placement import Placement, stage_layers
from specctl.core.products import quick_linears
from specctl.core.ragged import Frame, RowsCache
from specctl.core.target import LoadedTarget
from specctl.errors import NotSupportedError
from specctl.records.layers import NORM

KINDS = frozenset(("full_attention", "sliding_attention"))
"""Kinds of layers whose cache can forget tokens; a target with others reads its rows again each time."""


class TargetRows:
    """A loaded target that reads rows; `slots` are the states that a draft takes. Use it in a `with` block."""

    def __init__(self, target: LoadedTarget, slots: Sequence[str], placement: Placement) -> None:
        self.target, self.slots, self.placement = target, tuple(slots), placement
        self.can_cache = can_cache(target)
        asked = (*self.slots, *(() if NORM in self.slots else (NORM,)))
        self._owned = owned_slots(asked, target.decoder.owned, is_last_stage=placement.is_last_stage)
        shares = stage_layers(target.spec.num_layers, placement.num_stages)
        self._begin = sum(shares[: placement.stage])
        self._end = self._begin + shares[placement.stage]
        # Recorded by stages before this one; the boundary between them is the stream itself.
        self._earlier = () if placement.is_first_stage else self._below(self._begin)
        self._recorder = Recorder()
        self._stream: torch.Tensor | None = None
        known = inspect.signature(target.decoder.caller.forward).parameters
        # transformers renamed the argument in 5.24.
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._takes_positions = "position_ids" in known
        self._rule = logit_rule(target.model.config.get_text_config())  # type: ignore[operator, union-attr]
        self._has_window = _has_window(target.decoder.caller)
        self._entered = ExitStack()

    def __enter__(self) -> TargetRows:
        """Raises NotSupportedError for a whole target whose logits specctl cannot make."""
        model: Any = self.target.model
        self._entered.enter_context(record(self.target.decoder, self._owned, self._recorder, model=model))
        self._entered.enter_context(quick_linears(model))
        if self.placement.num_stages == 1 and not makes_logits(self.target, self.logits):
            self._entered.close()
            raise NotSupportedError(
                f"`{type(model).__name__}` makes its logits by more than its head, and specctl does not know how",
                where=self.target.spec.path,
                hint="measure on a server: `--engine vllm` or `--engine sglang`",
            )
        if not self.placement.is_first_stage:
            layer = self.target.decoder.layers[0]
            handle = layer.register_forward_pre_hook(self._hand_over, with_kwargs=True)
            self._entered.callback(handle.remove)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered.__exit__(*raised)

    @property
    def width_in(self) -> int:
        """Numbers of a position in the message from the stage before."""
        return self.target.spec.hidden_size * (1 + len(self._earlier))

    def new_cache(self) -> RowsCache | None:
        """An empty cache for some rows; None for a target that reads its rows again each time."""
        forget_lengths(self.target.model)
        return RowsCache(self.target.spec.num_layers) if self.can_cache else None

    @torch.inference_mode()
    def run(
        self, ids_BQ: torch.Tensor, frame: Frame, cache: RowsCache | None, received: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The states [B, Q, D] of this stage's slots and those received, by slot; `stream` is what goes on."""
        earlier = self._unpack(received)
        options: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            cache.frame = frame
            options = {"use_cache": True, self._cache_name: cache}
        if self._takes_positions:
            options["position_ids"] = frame.positions_BQ
        # A later stage has no embedding: what stands in its place gives token ids, and rotary phases take its dtype.
        options |= {"input_ids": ids_BQ} if received is None else {"inputs_embeds": self._stream}
        output = self.target.decoder.caller(
            attention_mask=None if cache is None else self._masks(frame),  # padded on the right, seen by none
            **options,
        )
        return {**earlier, **self._recorder.take(self._owned, self.target.model), "stream": output.last_hidden_state}

    def pack(self, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """The message for the stage after: the stream, and the states recorded below it, in the order of slots."""
        return torch.cat([states[name] for name in ("stream", *self._below(self._end))], dim=-1)

    def fused(self, states: dict[str, torch.Tensor]) -> torch.Tensor:
        """[B, Q, A*D] of all slots, on the last stage."""
        if not self.slots:
            return states[NORM][..., :0]
        return torch.cat([states[slot] for slot in self.slots], dim=-1)

    def logits(self, normed_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] in fp32, by the target's own head, on the last stage."""
        head = self.target.model.get_output_embeddings()  # type: ignore[operator]
        return self._rule(head(normed_ND).float())

    def _unpack(self, received: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if received is None:
            return {}
        stream, *earlier = torch.split(received, self.target.spec.hidden_size, dim=-1)
        self._stream = stream.contiguous()
        known = dict(zip(self._earlier, earlier, strict=True))
        border = str(self._begin)
        return {**known, border: self._stream} if border in self.slots else known

    def _below(self, boundary: int) -> tuple[str, ...]:
        return tuple(slot for slot in self.slots if slot != NORM and int(slot) < boundary)

    def _hand_over(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": self._stream}
        return (self._stream, *args[1:]), kwargs

    def _masks(self, frame: Frame) -> Any:
        """The attention masks, of each kind of layer where there is more than one."""
        config, dtype = self.target.model.config.get_text_config(), self.target.dtype  # type: ignore[operator, union-attr]
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None) if self._has_window else None
        if len(kinds) > 1:
            return {kind: frame.bias(window if "sliding" in kind else None, dtype) for kind in kinds}
        return frame.bias(window if not kinds or kinds == {"sliding_attention"} else None, dtype)


def _has_window(caller: nn.Module) -> bool:
    """Whether this class makes masks of a window: a `sliding_window` left over in a configuration of another does
    nothing, in transformers as here.
    """
    try:
        return "sliding_window" in inspect.getsource(type(caller))
    except (OSError, TypeError):
        return True


def can_cache(target: LoadedTarget) -> bool:
    """Whether the target keeps nothing but keys and values, one pair a layer, so that tokens can be forgotten.

    One that is told no positions, or makes biases of its own of a plain mask (ALiBi), cannot be told where rows
    stand either, and reads them again too.
    """
    config: Any = target.model.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    keeps_pairs = kinds <= KINDS and not getattr(config, "num_kv_shared_layers", 0)
    is_told = "position_ids" in inspect.signature(target.decoder.caller.forward).parameters
    # GPT-Neo cuts its local window by column, wherever a row stands.
    has_own_bias = getattr(config, "alibi", False) or "local" in (getattr(config, "attention_layers", None) or ())
    return keeps_pairs and is_told and not (getattr(target.model, "_is_stateful", False) or has_own_bias)

"""What a model's forward does with its parts, seen by running it on modules without storage.

A pipeline stage keeps its layers and has placeholders for the rest; that gives the same states only where the
stream alone goes from layer to layer, and each part runs once. Nothing is computed: shapes flow through.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from specctl.core.decoder import Decoder, find_decoder
from specctl.core.target import empty_model
from specctl.records.target import TargetSpec

LENGTH = 4
MASKED = ("full_attention", "sliding_attention", "chunked_attention")
_FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""What the forward of any model may raise on placeholders."""


class Placeholder(nn.Identity):
    """What transformers puts where another stage has a module: it gives back what it is called with first."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def why_no_stages(spec: TargetSpec, *, trust_remote_code: bool = False) -> str | None:
    """Why this model cannot be cut between its layers, or None where nothing says so.

    A model that does not run without storage (some mix of experts, some state spaces) is not judged.
    """
    model, decoder = _empty(spec, trust_remote_code)
    base = decoder.caller
    calls: Counter[str] = Counter()
    parts = {"norm": getattr(base, "norm", None), **{f"layers.{i}": layer for i, layer in enumerate(decoder.layers)}}
    for name, module in parts.items():
        if isinstance(module, nn.Module):
            module.register_forward_hook(lambda *_, name=name: calls.update((name,)))
    try:
        _run(model, base, None)
    except _FORWARD_ERRORS:
        return None
    often = sorted(name for name, count in calls.items() if count > 1)
    if often:
        return f"its forward runs `{often[0]}` {calls[often[0]]} times"
    middle = len(decoder.layers) // 2
    for begin, end in ((0, middle), (middle, len(decoder.layers))):
        error = _stage_error(spec, begin, end, trust_remote_code)
        if error is not None:
            return f"layers {begin} to {end - 1} do not run alone ({error})"
    return None


def _stage_error(spec: TargetSpec, begin: int, end: int, trust_remote_code: bool) -> str | None:
    model, decoder = _empty(spec, trust_remote_code)
    base: Any = decoder.caller
    for i in range(len(decoder.layers)):
        if not begin <= i < end:
            decoder.layers[i] = Placeholder()
    stream = None
    if begin:
        base.embed_tokens = Placeholder()
        stream = torch.empty(1, LENGTH, spec.hidden_size, device="meta", dtype=torch.bfloat16)
    if end < len(decoder.layers):
        base.norm = Placeholder()
    try:
        out = _run(model, base, stream).last_hidden_state
    except _FORWARD_ERRORS as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    is_stream = isinstance(out, torch.Tensor) and out.shape[-1] == spec.hidden_size
    return None if is_stream else "it gives more than one stream"


def _empty(spec: TargetSpec, trust_remote_code: bool) -> tuple[nn.Module, Decoder]:
    # Products of experts want 16 bits.
    model = empty_model(spec, trust_remote_code=trust_remote_code).to(torch.bfloat16).eval()
    return model, find_decoder(model, spec.num_layers)


@torch.inference_mode()
def _run(model: nn.Module, base: nn.Module, stream: torch.Tensor | None) -> Any:
    """The forward over `LENGTH` positions. Masks are given: to make one a model may look into its arguments."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    kinds = set(getattr(config, "layer_types", None) or ())
    mask = torch.zeros(1, 1, LENGTH, LENGTH, device="meta", dtype=torch.bfloat16)
    masks: Any = {kind: mask if kind in MASKED else None for kind in kinds} if len(kinds) > 1 else mask
    entered = {"inputs_embeds": stream}
    if stream is None:
        entered = {"input_ids": torch.zeros(1, LENGTH, dtype=torch.int64, device="meta")}
    positions = torch.arange(LENGTH, device="meta")[None]
    return base(attention_mask=masks, position_ids=positions, use_cache=False, **entered)

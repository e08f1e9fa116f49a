"""What a target does to the products of its head before they are its logits: scales, and a soft cap.

Configurations name these in many ways (facts as read in transformers 5.24: `modeling_*.py` of the families below);
where a whole model is at hand, a probe tells whether all of them are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from specctl.core.target import LoadedTarget

FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Cohere; Falcon-H1; Muse."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Granite and MiniCPM3; Inkling."""
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Gemma and others; RecurrentGemma; xLSTM."""
MULTIPLIES = ("hyperclovax",)
"""Model types that multiply by what others divide by."""
PROBE = 4
TOLERANCE = 0.02
"""Of the largest logit: more than 16-bit rounding of one product, less than any scale or cap worth having."""


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logits = cap * tanh(head * factor / divisor / cap), or without the cap where it is None."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @property
    def scale(self) -> float:
        """What products of the head are multiplied by."""
        return self.factor / self.divisor

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Logits of products of the head, in their dtype; in the order in which transformers does it."""
        out = products if self.factor == 1 else products * self.factor
        out = out if self.divisor == 1 else out / self.divisor
        return out if self.cap is None else (out / self.cap).tanh() * self.cap


def logit_rule(config: Any) -> LogitRule:
    """The rule of a text configuration: an object of transformers, or what its config.json holds."""
    said = SimpleNamespace(**config) if isinstance(config, Mapping) else config

    def number(name: str) -> float | None:
        value = getattr(said, name, None)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    multiplies = getattr(said, "model_type", None) in MULTIPLIES
    factors = (*FACTORS, *(DIVISORS if multiplies else ()))
    divisors = [number(name) for name in (() if multiplies else DIVISORS)]
    base, width = number("dim_model_base"), number("hidden_size")
    if base and width and number("logits_scaling") is None:
        divisors.append(width / base)  # MiniCPM, whose class computes the divisor
    return LogitRule(
        _product([number(name) for name in factors]),
        _product(divisors),
        next((cap for cap in map(number, CAPS) if cap), None),
    )


def _product(values: list[float | None]) -> float:
    out = 1.0
    for value in values:
        out *= 1.0 if value is None else value
    return out


@torch.inference_mode()
def makes_logits(target: LoadedTarget, logits: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether `logits` makes of a whole target's final states what the target itself does, on a few tokens."""
    ids = torch.arange(1, 1 + PROBE, device=target.device)[None] % target.spec.vocab_size
    model: Any = target.model
    own = model(input_ids=ids, use_cache=False, return_dict=True).logits[0].float()
    final = target.decoder.caller(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state[0]
    found = logits(final)[..., : own.shape[-1]]
    return bool((found - own).abs().max() <= TOLERANCE * own.abs().max())

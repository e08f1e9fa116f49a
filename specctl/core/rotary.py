"""Rotary position embedding of every kind transformers knows. Phases follow the position values.

Positions may start anywhere, repeat (packed documents) and exceed any table length: cos and sin are
computed for the positions asked for (NVIDIA-NeMo/Automodel#2377). Tables are fp32, or fp64 for a fp64
model. Legend: N rows, H heads, E head dim, R rotary width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specctl.errors import NotSupportedError, UsageError
from specctl.records.head import HeadConfig

CHANGES_WITH_LENGTH = ("dynamic", "longrope")
"""Kinds whose frequencies depend on the longest position of a call."""

_UNUSABLE = (LookupError, RuntimeError, TypeError, ValueError, ArithmeticError)
"""What transformers raises for settings that are missing, of another length or of no use."""


@dataclass(frozen=True, slots=True)
class Phases:
    """cos and sin [N, R] of the first R elements of each head; the rest passes unturned."""

    cos_NR: torch.Tensor
    sin_NR: torch.Tensor

    def turn(self, x_NHE: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys [N or 1, H, E]; a single row is turned to every position.

        Source: GPT-NeoX, halves not interleaved, as vLLM and transformers.
        """
        width = self.cos_NR.shape[-1]
        cos, sin = self.cos_NR[:, None], self.sin_NR[:, None]
        x = x_NHE[..., :width].to(cos.dtype)
        first, second = x.chunk(2, dim=-1)
        turned = (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x_NHE.dtype)
        if width == x_NHE.shape[-1]:
            return turned
        rest = x_NHE[..., width:].expand(*turned.shape[:-1], -1)
        return torch.cat((turned, rest), dim=-1)


class Rotary:
    """The phases of a head's rope. No module: its frequencies must never be cast with the weights.

    Raises NotSupportedError for a `rope_type` that transformers does not know, UsageError for settings that
    give no frequencies.
    """

    def __init__(self, head: HeadConfig) -> None:
        self._kind = str(head.rope.get("rope_type", "default"))
        self._config = None if self._kind == "default" else _transformers_config(head, self._kind)
        self.inv_freq, self._scale = self._frequencies(head.rope, head.head_dim)
        if not bool(((self.inv_freq > 0) & self.inv_freq.isfinite()).all()):
            raise UsageError(f"the rope settings {dict(head.rope)} give frequencies that are not finite and above 0")

    def __call__(self, positions_N: torch.Tensor, dtype: torch.dtype) -> Phases:
        """The phases at `positions_N` int64 [N], for a model computing in `dtype`."""
        inv_freq, scale = self.inv_freq, self._scale
        if self._kind in CHANGES_WITH_LENGTH and positions_N.numel():
            inv_freq, scale = _initialise(self._config, self._kind, int(positions_N.max()) + 1)
        exact = torch.promote_types(dtype, torch.float32)
        angles = positions_N[:, None].to(exact) * inv_freq.to(positions_N.device, exact)
        angles = torch.cat((angles, angles), dim=-1)
        return Phases(angles.cos() * scale, angles.sin() * scale)

    def _frequencies(self, rope: Mapping[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
        if self._config is not None:
            return _initialise(self._config, self._kind, None)
        width = int(head_dim * float(rope.get("partial_rotary_factor", 1.0)))
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        return (float(rope.get("rope_theta", 10000.0)) ** -exponents).float(), 1.0


def _transformers_config(head: HeadConfig, kind: str) -> Any:
    """The settings of `head` where transformers' rope functions look for them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise NotSupportedError(
            f"rope type `{kind}` is not known to transformers",
            hint=f"there are: default, {', '.join(ROPE_INIT_FUNCTIONS)}",
        )
    try:
        return LlamaConfig(
            hidden_size=head.num_attention_heads * head.head_dim,
            num_attention_heads=head.num_attention_heads,
            head_dim=head.head_dim,
            max_position_embeddings=head.max_position_embeddings or 2048,
            rope_parameters=dict(head.rope),
        )
    except _UNUSABLE as error:
        raise _unusable(head.rope, head.head_dim, error) from error


def _initialise(config: Any, kind: str, length: int | None) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
    except _UNUSABLE as error:
        raise _unusable(config.rope_parameters, config.head_dim, error) from error
    return inv_freq.float(), float(scale)


def _unusable(rope: Mapping[str, Any], head_dim: int, error: Exception) -> UsageError:
    reason = str(error.args[0] if error.args else error)
    return UsageError(
        f"the rope settings {dict(rope)} make no rope for heads of {head_dim}: {reason}",
        hint="correct them in the target's config.json, or pass `rope_theta` in the config file for a plain rope",
    )

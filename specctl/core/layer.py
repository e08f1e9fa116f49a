"""One decoder layer of a draft. Rows are elements, not batches; who sees whom is the caller's `attend`.

Layer 0 attends over [embedding, hidden] side by side. What the embedding brings, its *lead*, is computed
apart, because one token enters every step of EAGLE-3.

Legend: N rows, H hidden size, J key heads, E head dim.
Source: arXiv 2503.01840; vllm `models/llama_eagle3.py`, `models/qwen3_eagle3.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.activations import ACT2FN

from specctl.core.attention import Attend, KeysValues
from specctl.core.rotary import Phases
from specctl.records.head import HeadConfig

Lead = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What embeddings add to the queries, keys and values of layer 0, each [N, width], before the rotary turn."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight in fp32, given back in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Normed.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _Normed(torch.autograd.Function):
    """RMSNorm whose backward is written out: a quarter of the passes that autograd makes of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        unit = x.to(scale.dtype) * scale
        grad_unit = grad * unit
        grad_weight = grad_unit.flatten(0, -2).sum(0).to(weight.dtype)
        along = (grad_unit @ weight.to(scale.dtype))[..., None] / x.shape[-1]
        grad_x = (grad * weight.to(scale.dtype)).sub_(unit.mul_(along)).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class Attention(nn.Module):
    """Projections and rotary phases around the caller's `attend`."""

    def __init__(self, head: HeadConfig, width: int) -> None:
        super().__init__()
        self.head_dim, bias = head.head_dim, head.attention_bias
        queries, keys = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        # Qwen3's output projection has no bias whatever the config says; Llama's follows it.
        self.o_proj = nn.Linear(queries, head.hidden_size, bias=bias and head.block == "llama")
        if head.block == "qwen3":
            self.q_norm = RMSNorm(head.head_dim, head.rms_norm_eps)
            self.k_norm = RMSNorm(head.head_dim, head.rms_norm_eps)
        self.is_normed = head.block == "qwen3"

    def lead(self, x_N: torch.Tensor) -> Lead:
        """The part of the projections that comes from the first columns, and their biases."""
        width = x_N.shape[-1]
        q, k, v = (linear(x_N, p.weight[:, :width], p.bias) for p in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def forward(
        self, x_N: torch.Tensor, lead_N: Lead | None, phases: Phases, attend: Attend, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, KeysValues]:
        """Output of the queries `rows` (all without) and keys and values [N, J, E] of all rows.

        A single row `x_N` stands for all: it is projected once and turned to every position.
        """
        x_Q, phases_Q = (x_N, phases) if rows is None else (x_N[rows], phases_at(phases, rows))
        lead_Q, lead_K, lead_V = (None, None, None) if lead_N is None else lead_N
        if lead_Q is not None and rows is not None:
            lead_Q = lead_Q[rows]
        query = self._heads(self.q_proj, x_Q, lead_Q)
        key, value = self._heads(self.k_proj, x_N, lead_K), self._heads(self.v_proj, x_N, lead_V)
        if self.is_normed:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = phases_Q.turn(query), phases.turn(key)
        value = value.expand(key.shape)
        return self.o_proj(attend(query, key, value).flatten(1)), (key, value)

    def _heads(self, proj: nn.Linear, x: torch.Tensor, lead: torch.Tensor | None) -> torch.Tensor:
        """[N, heads, E]: the projection of `x`, which is the last columns where a lead brings the first."""
        out = proj(x) if lead is None else linear(x, proj.weight[:, -x.shape[-1] :]) + lead
        return out.view(out.shape[0], out.shape[1] // self.head_dim, self.head_dim)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, head: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(head.hidden_size, head.intermediate_size, bias=head.mlp_bias)
        self.up_proj = nn.Linear(head.hidden_size, head.intermediate_size, bias=head.mlp_bias)
        self.down_proj = nn.Linear(head.intermediate_size, head.hidden_size, bias=head.mlp_bias)
        self.act = ACT2FN[head.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One decoder layer; layer 0 takes the embedding beside the hidden state."""

    def __init__(self, head: HeadConfig, index: int) -> None:
        super().__init__()
        self.is_first, self.is_residual_normed = index == 0, head.norm_before_residual
        self.window = _window(head, index)
        self.input_layernorm = RMSNorm(head.hidden_size, head.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(head.hidden_size, head.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(head.hidden_size, head.rms_norm_eps)
        self.self_attn = Attention(head, head.hidden_size * (2 if self.is_first else 1))
        self.mlp = MLP(head)

    def lead(self, embed_N: torch.Tensor) -> Lead:
        """What embeddings [N, H] bring into this layer, which must be the first."""
        return self.self_attn.lead(self.input_layernorm(embed_N))

    def forward(
        self,
        lead_N: Lead | None,
        hidden_N: torch.Tensor,
        phases: Phases,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KeysValues]:
        """The stream [rows, H] after this layer, and the keys and values [N, J, E] of all rows.

        `lead_N` and `hidden_N` have N rows, or without `rows` one that stands for every row; only
        the rows `rows` are computed beyond keys and values. Deeper layers take no `lead_N`.
        """
        normed = self.hidden_norm(hidden_N) if self.is_first else self.input_layernorm(hidden_N)
        residual = normed if self.is_first and self.is_residual_normed else hidden_N
        mixed, keys_values = self.self_attn(normed, lead_N, phases, attend, rows)
        stream = mixed + (residual if rows is None else residual[rows])
        return stream + self.mlp(self.post_attention_layernorm(stream)), keys_values


def lead_at(lead_N: Lead, rows: torch.Tensor | slice) -> Lead:
    """Some rows of a lead."""
    return lead_N[0][rows], lead_N[1][rows], lead_N[2][rows]


def phases_at(phases: Phases, rows: torch.Tensor) -> Phases:
    """The phases of some rows."""
    return Phases(phases.cos_NR[rows], phases.sin_NR[rows])


def _window(head: HeadConfig, index: int) -> int | None:
    if head.layer_types is None or head.sliding_window is None:
        return None
    return head.sliding_window if head.layer_types[index] == "sliding_attention" else None

"""Verification of drafts: greedy by equality, sampled so that the output is the target's own distribution.

A draft token x is kept with probability min(1, p(x) / q(x)); at the first that is not, the next token is
drawn from max(p - q, 0), renormalised; when all are kept, from p after the last. A draft that takes its
likeliest token has q = 1 there. Source: arXiv 2211.17192, Algorithm 1; arXiv 2302.01318.

Legend: K draft tokens, V the target's vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from specctl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Sampler:
    """How next tokens are drawn from logits; temperature 0 takes the likeliest.

    top-k and then top-p cut the distribution, and both to what is left of it (0 and 1 cut nothing).
    Raises UsageError for values without a meaning.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"`--temperature {self.temperature}` is not 0 or more")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"`--top-p {self.top_p}` is not above 0 and up to 1")
        if self.top_k < 0:
            raise UsageError(f"`--top-k {self.top_k}` is not 0 or more")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    def odds(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """The distribution [N, V] that tokens are drawn from, fp32."""
        scaled = logits_NV.float() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        p = scaled.softmax(-1)
        if self.top_p < 1:
            ranked, order = p.sort(dim=-1, descending=True, stable=True)
            is_cut = ranked.cumsum(-1) - ranked >= self.top_p
            p = p.masked_fill(torch.zeros_like(is_cut).scatter(-1, order, is_cut), 0.0)
        return p / p.sum(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many draft tokens were kept, and the token that the target says after them."""

    accepted: int
    following: int


def verify_greedily(greedy: list[int], drafted: list[int]) -> Verdict:
    """`greedy` [K + 1] are the target's tokens after the last known one and after each draft token."""
    accepted = next((i for i, token in enumerate(drafted) if token != greedy[i]), len(drafted))
    return Verdict(accepted, greedy[accepted])


def verify_sampled(
    p_QV: torch.Tensor, drafted: list[int], q_KV: torch.Tensor | None, generator: torch.Generator
) -> Verdict:
    """Keep or refuse draft tokens one after the other; `p_QV` [K + 1, V] are the target's distributions.

    `q_KV` [K, V] are those that the draft tokens were drawn from; None says that each was its likeliest.
    """
    for depth, token in enumerate(drafted):
        p, q = p_QV[depth], None if q_KV is None else q_KV[depth]
        bound = float(p[token]) if q is None else float(p[token]) / max(float(q[token]), 1e-38)
        if draw_uniform(generator) < bound:
            continue
        if q is None:
            left = p.clone()
            left[token] = 0.0
        else:
            left = (p - q).clamp_min(0.0)
        # Rounding can leave nothing where p and q are equal; p is then as good.
        return Verdict(depth, draw(left if float(left.sum()) > 0 else p, generator))
    return Verdict(len(drafted), draw(p_QV[len(drafted)], generator))


def draw(weights_V: torch.Tensor, generator: torch.Generator) -> int:
    """One token with probability in proportion to its weight."""
    return int(torch.multinomial(weights_V.cpu(), 1, generator=generator))


def draw_uniform(generator: torch.Generator) -> float:
    """A number from [0, 1)."""
    return float(torch.rand((), generator=generator, dtype=torch.float64))


def row_generator(seed: int, key: str) -> torch.Generator:
    """The random numbers of one prompt, whatever else is decoded beside it."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

"""Verification of drafts: greedy by equality, sampled so that the output is the target's own distribution.

A draft token x is kept with probability min(1, p(x) / q(x)); at the first that is not, the next token is
drawn from max(p - q, 0), renormalised; when all are kept, from p after the last. A draft that takes its
likeliest token has q = 1 there. Source: arXiv 2211.17192, Algorithm 1; arXiv 2302.01318.

Legend: B rows, K draft tokens, Q = K + 1, N rows of logits, V the target's vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
        # Less the greatest, so that no temperature makes infinite logits; 1e-30 is the likeliest token's alone.
        logits = logits_NV.float()
        scaled = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        p = scaled.softmax(-1)
        if self.top_p < 1:
            ranked, order = p.sort(dim=-1, descending=True, stable=True)
            is_cut = ranked.cumsum(-1) - ranked >= self.top_p
            p = p.masked_fill(torch.zeros_like(is_cut).scatter(-1, order, is_cut), 0.0)
        return p / p.sum(-1, keepdim=True)


def verify_greedily(greedy_BQ: torch.Tensor, drafted_BK: torch.Tensor) -> torch.Tensor:
    """How many drafted tokens each row keeps, int64 [B]; Q = K + 1.

    `greedy_BQ` are the target's tokens after the last known one and after each drafted one: a row that keeps
    n goes on with greedy_BQ[:, n].
    """
    return (greedy_BQ[:, :-1] == drafted_BK).cumprod(1).sum(1)


def verify_sampled(
    p_BQV: torch.Tensor, drafted_BK: torch.Tensor, q_BKV: torch.Tensor | None, uniforms_BQ: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafted tokens each row keeps, and the token that follows them, int64 [B] each; Q = K + 1.

    `p_BQV` are the target's distributions, `q_BKV` those that the drafted tokens were drawn from (None: each
    was the draft's likeliest), `uniforms_BQ` numbers from [0, 1) in fp64: one to judge each drafted token by,
    and one to draw the token that follows.
    """
    num_rows, depth = drafted_BK.shape
    p_BK = p_BQV[:, :depth].gather(2, drafted_BK[..., None])[..., 0]
    q_BK = 1.0 if q_BKV is None else q_BKV.gather(2, drafted_BK[..., None])[..., 0]
    accepted_B = (uniforms_BQ[:, :depth] * q_BK < p_BK).cumprod(1).sum(1)
    left_BV = p_BQV[torch.arange(num_rows, device=p_BQV.device), accepted_B]
    refused = (accepted_B < depth).nonzero()[:, 0]
    at = accepted_B[refused]
    if q_BKV is None:
        left_BV[refused, drafted_BK[refused, at]] = 0.0
    else:
        rest = (left_BV[refused] - q_BKV[refused, at]).clamp_min_(0.0)
        # Rounding can leave nothing where p and q are equal; p is then as good.
        left_BV[refused] = torch.where(rest.sum(-1, keepdim=True) > 0, rest, left_BV[refused])
    return accepted_B, draw(left_BV, uniforms_BQ[:, depth])


def draw(weights_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """A token for each row, int64 [B], with probability in proportion to its weight; one of weight 0 never."""
    sums_BV = weights_BV.double().cumsum(-1)
    total_B = sums_BV[:, -1]
    # The product may round up to the total, beyond the last token of any weight.
    aim_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    return torch.searchsorted(sums_BV, aim_B[:, None], right=True)[:, 0]


def uniforms(generators: Sequence[torch.Generator], count: int, device: torch.device) -> torch.Tensor:
    """[B, count] numbers from [0, 1) in fp64, each row's from its own generator."""
    return torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in generators]).to(device)


def row_generator(seed: int, key: str) -> torch.Generator:
    """The random numbers of one prompt, whatever else is decoded beside it."""
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

"""The loss of a draft against its target, fused with both heads: no logits of a whole sequence exist.

Rows are taken a chunk at a time. In a chunk the teacher's logits are formed once for each state that any
depth is scored on, the student's for each row, the gradient of both inputs follows at once, and the
logits are dropped. Sums, never means; softmax and loss in fp32 (fp64 for a fp64 model).

Legend: M rows (elements), U teacher states, D target's hidden size, H draft's, V vocab, W draft vocab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specctl.core.device import is_gpu
from specctl.records.draft import LossKind

CHUNK_ELEMENTS = 3 << 20
"""Logits formed at once, in elements: 12 MB in fp32. Smaller and larger chunks were slower on one core."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's head, read once: the rows of the draft vocabulary first, then all others.

    `weight_VD` [V, D]; `ids_V` int64, the target's id of each row, None where rows are in the target's
    own order (whole vocabulary). Logits are `softcap * tanh(. / softcap)` where there is a cap, after
    `scale`. Build with `make_teacher`.
    """

    weight_VD: torch.Tensor
    ids_V: torch.Tensor | None
    draft_vocab_size: int
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, states_UD: torch.Tensor, rows: slice) -> torch.Tensor:
        """[U, rows] in fp32 or wider."""
        out = product(states_UD.to(self.weight_VD.dtype), self.weight_VD[rows]) * self.scale
        return out if self.softcap is None else (out / self.softcap).tanh() * self.softcap

    def draft_ids(self, target_ids: torch.Tensor) -> torch.Tensor:
        """The draft id of each target id, -1 for those outside the draft vocabulary."""
        if self.ids_V is None:
            return target_ids
        inside = self.ids_V[: self.draft_vocab_size]
        found = torch.searchsorted(inside, target_ids).clamp_max(self.draft_vocab_size - 1)
        return torch.where(inside[found] == target_ids, found, -1)

    @torch.no_grad()
    def greedy_ids(self, states_UD: torch.Tensor) -> torch.Tensor:
        """int64 [U]: the target's id with the largest logit in the whole vocabulary.

        Costs V / W times the teacher's logits, so a loader computes it once for each sample.
        """
        best_U = states_UD.new_full(states_UD.shape[:1], -torch.inf, dtype=exact_dtype(states_UD.dtype))
        found_U = torch.zeros_like(best_U, dtype=torch.int64)
        step = max(CHUNK_ELEMENTS // max(states_UD.shape[0], 1), 256)
        for lower in range(0, self.weight_VD.shape[0], step):
            logits = self.logits(states_UD, slice(lower, lower + step))
            top = logits.amax(-1)
            # Finding where costs 17 times what finding how much does, and few rows improve on earlier chunks.
            rows = (top > best_U).nonzero()[:, 0]
            found_U[rows], best_U[rows] = logits[rows].argmax(-1) + lower, top[rows]
        return found_U if self.ids_V is None else self.ids_V[found_U]


def make_teacher(
    weight_VD: torch.Tensor, draft_ids_W: torch.Tensor | None, *, scale: float = 1.0, softcap: float | None = None
) -> Teacher:
    """The teacher of a head [V, D] whose draft vocabulary is `draft_ids_W`, rising (None: all of it)."""
    if draft_ids_W is None:
        return Teacher(weight_VD, None, weight_VD.shape[0], scale, softcap)
    is_outside = torch.ones(weight_VD.shape[0], dtype=torch.bool, device=weight_VD.device)
    is_outside[draft_ids_W] = False
    ids = torch.cat((draft_ids_W, is_outside.nonzero()[:, 0]))
    return Teacher(weight_VD[ids], ids, draft_ids_W.shape[0], scale, softcap)


@dataclass(frozen=True, slots=True)
class Scored:
    """What the loss found for each row: its unweighted loss, whether the draft's greedy token is the
    target's, whether the target's lies outside the draft vocabulary, whether the row counts."""

    total: torch.Tensor
    losses_M: torch.Tensor
    hits_M: torch.Tensor
    outside_M: torch.Tensor
    is_counted_M: torch.Tensor


def distil(
    normed_MH: torch.Tensor,
    head_WH: torch.Tensor,
    *,
    teacher: Teacher,
    states_UD: torch.Tensor,
    rows_M: torch.Tensor,
    weights_M: torch.Tensor,
    kind: LossKind,
    greedy_U: torch.Tensor | None = None,
) -> Scored:
    """The weighted sum of losses over rows, differentiable in `normed_MH` and `head_WH`.

    Row i is scored against teacher state `rows_M[i]`. `kl` is KL(target || draft) over the draft
    vocabulary, the target's distribution renormalised there; `ce` the cross-entropy of the target's
    greedy token, and rows where that lies outside the draft vocabulary count for nothing.
    """
    if torch.is_autocast_enabled(normed_MH.device.type):
        dtype = torch.get_autocast_dtype(normed_MH.device.type)
        normed_MH, head_WH = normed_MH.to(dtype), head_WH.to(dtype)
    greedy = teacher.greedy_ids(states_UD) if greedy_U is None else greedy_U
    target = _Target(teacher, states_UD, teacher.draft_ids(greedy), kind)
    return Scored(*_Distil.apply(normed_MH, head_WH, target, rows_M, weights_M))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Target:
    teacher: Teacher
    states_UD: torch.Tensor
    greedy_U: torch.Tensor  # draft ids, -1 outside
    kind: LossKind

    def odds(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities [u, W] of teacher states and their negative entropy [u]."""
        logits = self.teacher.logits(self.states_UD[states], slice(0, self.teacher.draft_vocab_size))
        top = logits.amax(-1)
        p = logits.softmax(-1)
        return p, logits.mul_(p).sum(-1) - (top - p.amax(-1).log())


class _Distil(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, target: _Target, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        exact = exact_dtype(hidden.dtype)
        losses = hidden.new_zeros(hidden.shape[0], dtype=exact)
        hits = torch.zeros_like(losses, dtype=torch.bool)
        outside = target.greedy_U[rows] < 0
        is_counted = ~outside if target.kind == "ce" else torch.ones_like(outside)
        weights = weights.to(exact) * is_counted
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=exact) if needs_head else None
        size = max(CHUNK_ELEMENTS // head.shape[0], 16)
        for part in torch.split(rows.argsort(stable=True), size):
            chunk = _Chunk.of(rows, part)
            chosen = hidden[chunk.at]
            losses[chunk.at], hits[chunk.at], z = _score(product(chosen, head), target, chunk, weights[chunk.at])
            z = z.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[chunk.at] = z @ head
            if grad_head is not None:
                add_product(grad_head, z, chosen)
        ctx.grads = (grad_hidden, grad_head, head.dtype)
        losses = losses * is_counted
        ctx.mark_non_differentiable(losses, hits, outside, is_counted)
        return (weights * losses).sum(), losses, hits, outside, is_counted

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        grad_hidden, grad_head, dtype = ctx.grads
        ctx.grads = (None, None, dtype)  # scaled in place, so that they are never held twice
        if grad_hidden is not None:
            grad_hidden = grad_hidden.mul_(grad)
        if grad_head is not None:
            grad_head = grad_head.mul_(grad).to(dtype)
        return grad_hidden, grad_head, None, None, None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows scored together: `at` int64 [m], in runs in which every teacher state comes once at most.

    `states` [u] are those states, `local` [m] the state of each row among them, `runs` the runs as slices
    of rows. So the teacher's odds meet most rows as a view, and are not copied for each.
    """

    at: torch.Tensor
    states: torch.Tensor
    local: torch.Tensor
    runs: tuple[slice, ...]

    @staticmethod
    def of(rows_M: torch.Tensor, part: torch.Tensor) -> _Chunk:
        """The chunk of the rows `part`, which lie in order of their states."""
        states, local, counts = torch.unique_consecutive(rows_M[part], return_inverse=True, return_counts=True)
        times = torch.arange(len(part), device=part.device) - (counts.cumsum(0) - counts)[local]
        order = times.argsort(stable=True)
        bounds = [0, *torch.bincount(times).cumsum(0).tolist()]
        return _Chunk(part[order], states, local[order], tuple(map(slice, bounds, bounds[1:])))

    def odds_of(self, odds_UW: torch.Tensor, run: slice) -> torch.Tensor:
        """The odds [rows, W] of one run, a view where its states follow each other."""
        local = self.local[run]
        first, last = int(local[0]), int(local[-1])
        return odds_UW[first : last + 1] if last - first + 1 == len(local) else odds_UW[local]


def _score(
    z: torch.Tensor, target: _Target, chunk: _Chunk, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses and hits of a chunk's logits `z` [m, W], and its weighted gradient; spoils `z`."""
    greedy = target.greedy_U[chunk.states][chunk.local]
    inside, scale = greedy.clamp_min(0)[:, None], weights[:, None]
    top = z.amax(-1)
    picked = z.gather(1, inside)[:, 0]
    grad = z.softmax(-1)
    # The largest probability is exp(top - lse), so the log-sum-exp costs no pass of its own.
    losses = top - grad.amax(-1).log()
    if target.kind == "kl":
        odds, negative_entropy = target.odds(chunk.states)
        losses += negative_entropy[chunk.local]
        for run in chunk.runs:
            p = chunk.odds_of(odds, run)
            losses[run] -= z[run].mul_(p).sum(-1)
            grad[run] -= p
        grad.mul_(scale)
    else:
        losses -= picked
        grad.mul_(scale).scatter_add_(1, inside, -scale)
    return losses, (greedy >= 0) & (picked == top), grad


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that softmax and sums are taken in."""
    return torch.promote_types(dtype, torch.float32)


def product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """a @ b.T [M, N] in fp32 or wider."""
    if is_gpu(a_MK.device) and a_MK.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a_MK, b_NK.T, out_dtype=torch.float32)
    return (a_MK @ b_NK.T).to(exact_dtype(a_MK.dtype))


def add_product(into_NK: torch.Tensor, a_MN: torch.Tensor, b_MK: torch.Tensor) -> None:
    """into += a.T @ b, summed in the dtype of `into`."""
    if a_MN.dtype == into_NK.dtype:
        into_NK.addmm_(a_MN.T, b_MK)
    else:
        into_NK += a_MN.T @ b_MK

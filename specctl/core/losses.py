"""The loss of a draft against its target, fused with both heads: no logits of a whole sequence exist.

Teacher states are taken a chunk at a time, and of each chunk the rows in runs in which a state comes once
at most. The teacher's logits are formed once for each state that any depth is scored on, the student's for
each row, the gradient of both inputs follows at once, and the logits are dropped. Sums, never means;
softmax and loss in fp32 (fp64 for a fp64 model).

Legend: M rows (elements), U teacher states, D target's hidden size, H draft's, V vocab, W draft vocab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from specctl.core.device import is_gpu
from specctl.core.products import multiply
from specctl.records.draft import LossKind

CHUNK_ELEMENTS = 3 << 20
"""Logits formed at once, in elements: 12 MB in fp32. Chunks of 4 to 36 MB cost the same on one core."""
GPU_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's head: the rows of the draft vocabulary, and all of it for greedy tokens.

    `inside_WD` [W, D] in the dtype of the products; `whole_VD` [V, D] as stored, often a mapped file that
    is read a part at a time. `ids_W` int64 are the target's ids of the draft vocabulary, rising, None where
    it is the whole one. Logits are `softcap * tanh(. / softcap)` where there is a cap, after `scale`.
    Build with `make_teacher`.
    """

    inside_WD: torch.Tensor
    whole_VD: torch.Tensor
    ids_W: torch.Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, states_UD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        """[U, N] in fp32 or wider, by some rows of the head."""
        out = product(states_UD.to(self.inside_WD.dtype), weight_ND.to(self.inside_WD.dtype))
        out = out if self.scale == 1.0 else out.mul_(self.scale)
        return out if self.softcap is None else (out / self.softcap).tanh() * self.softcap

    def draft_ids(self, target_ids: torch.Tensor) -> torch.Tensor:
        """The draft id of each target id, -1 for those outside the draft vocabulary."""
        if self.ids_W is None:
            return target_ids
        found = torch.searchsorted(self.ids_W, target_ids).clamp_max(len(self.ids_W) - 1)
        return torch.where(self.ids_W[found] == target_ids, found, -1)

    @torch.no_grad()
    def greedy_ids(self, states_UD: torch.Tensor) -> torch.Tensor:
        """int64 [U]: the target's id with the largest logit in the whole vocabulary.

        Costs V / W times the teacher's logits, so a loader computes it once for each sample.
        """
        best_U = states_UD.new_full(states_UD.shape[:1], -torch.inf, dtype=exact_dtype(states_UD.dtype))
        found_U = torch.zeros_like(best_U, dtype=torch.int64)
        step = max(_chunk_elements(self.inside_WD) // max(states_UD.shape[0], 1), 256)
        for lower in range(0, self.whole_VD.shape[0], step):
            logits = self.logits(states_UD, self.whole_VD[lower : lower + step])
            top = logits.amax(-1)
            # Finding where costs 17 times what finding how much does, and few rows improve on earlier chunks.
            rows = (top > best_U).nonzero()[:, 0]
            found_U[rows], best_U[rows] = logits[rows].argmax(-1) + lower, top[rows]
        return found_U


def make_teacher(
    weight_VD: torch.Tensor,
    draft_ids_W: torch.Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Teacher:
    """The teacher of a head [V, D] whose draft vocabulary is `draft_ids_W`, rising (None: all of it).

    Its products are taken in `dtype`, the head's own without one.
    """
    inside = weight_VD if draft_ids_W is None else weight_VD[draft_ids_W]
    return Teacher(inside.to(dtype or weight_VD.dtype), weight_VD, draft_ids_W, scale, softcap)


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
        logits = self.teacher.logits(self.states_UD[states], self.teacher.inside_WD)
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
        spare = None
        for states, runs in _chunks(rows, max(_chunk_elements(head) // head.shape[0], 16)):
            odds = target.odds(states) if target.kind == "kl" else None
            for at, local in runs:
                chosen, scale = hidden[at], weights[at, None]
                z = product(chosen, head)
                if spare is None or len(spare) < len(z):
                    spare = torch.empty_like(z)  # fresh memory costs as much as a softmax, so it is used again
                losses[at], hits[at] = _score(z, odds, local, target.greedy_U[states[local]], into=spare[: len(z)])
                z = spare[: len(z)].to(hidden.dtype)
                if grad_hidden is not None:
                    grad_hidden[at] = multiply(z, head).mul_(scale)
                if grad_head is not None:
                    add_product(grad_head, z, (chosen * scale).to(z.dtype))
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


def _chunks(rows_M: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """About `size` teacher states at a time, and their rows in runs: (rows [m], the state of each among those).

    In a run the states rise, each once at most, so that the teacher's odds meet most rows as a view.
    Chunks are of one size, a quarter above `size` at most: a rest of few rows would read all of both heads.
    """
    order = rows_M.argsort(stable=True)
    states, local, counts = torch.unique_consecutive(rows_M[order], return_inverse=True, return_counts=True)
    parts = max(-(-len(states) // (size + size // 4)), 1)
    size = max(-(-len(states) // parts), 1)
    times = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[local]
    most = int(counts.max()) if len(counts) else 0
    run_of = local // size * most + times
    by_run = run_of.argsort(stable=True)
    sizes = torch.bincount(run_of, minlength=-(-len(states) // size) * most).tolist()
    runs = list(zip(torch.split(order[by_run], sizes), torch.split((local % size)[by_run], sizes), strict=True))
    for number, chunk in enumerate(torch.split(states, size) if most else ()):
        yield chunk, [run for run in runs[number * most : (number + 1) * most] if len(run[0])]


def _score(
    z: torch.Tensor,
    odds: tuple[torch.Tensor, torch.Tensor] | None,
    local: torch.Tensor,
    greedy: torch.Tensor,
    *,
    into: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and hits of a run's logits `z` [m, W], and its gradient `into` memory like it; spoils `z`.

    `odds` are probabilities [u, W] and negative entropies [u] of states, `local` [m] those of the rows.
    Without them the loss is the cross-entropy of `greedy`.
    """
    inside = greedy.clamp_min(0)[:, None]
    top = z.amax(-1)
    picked = z.gather(1, inside)[:, 0]
    grad = torch.softmax(z, -1, out=into)
    # The largest probability is exp(top - lse), so the log-sum-exp costs no pass of its own.
    losses = top - grad.amax(-1).log()
    if odds is not None:
        p, negative_entropy = _rows_of(odds[0], local), odds[1][local]
        losses += negative_entropy - z.mul_(p).sum(-1)
        grad.sub_(p)
    else:
        losses -= picked
        grad.scatter_add_(1, inside, torch.full_like(losses, -1.0)[:, None])
    return losses, (greedy >= 0) & (picked == top)


def _rows_of(table: torch.Tensor, rising: torch.Tensor) -> torch.Tensor:
    """Some rows of a table, as a view where they follow each other."""
    first, last = int(rising[0]), int(rising[-1])
    return table[first : last + 1] if last - first + 1 == len(rising) else table[rising]


def _chunk_elements(head: torch.Tensor) -> int:
    return GPU_CHUNK_ELEMENTS if is_gpu(head.device) else CHUNK_ELEMENTS


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that softmax and sums are taken in."""
    return torch.promote_types(dtype, torch.float32)


def product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """a @ b.T [M, N] in fp32 or wider."""
    if is_gpu(a_MK.device) and a_MK.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a_MK, b_NK.T, out_dtype=torch.float32)
    return multiply(a_MK, b_NK.T).to(exact_dtype(a_MK.dtype))


def add_product(into_NK: torch.Tensor, a_MN: torch.Tensor, b_MK: torch.Tensor) -> None:
    """into += a.T @ b, summed in the dtype of `into`."""
    if a_MN.dtype == into_NK.dtype:
        into_NK.addmm_(a_MN.T, b_MK)
    else:
        into_NK += a_MN.T @ b_MK

"""AdamW over gradients of which a trained embedding's holds only the rows that occurred.

A dense gradient of an embedding is as large as the embedding, and nearly all of it zero. The update is
that of a dense one, bit for bit: moments of rows without a gradient decay and still move their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

ROWS_ELEMENTS = 1 << 21
"""Elements of an embedding updated at once: 8 MB of dense gradient."""


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], *, lr: float, betas: Sequence[float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over `parameters`, fused."""
    return torch.optim.AdamW(list(parameters), lr=lr, betas=(betas[0], betas[1]), weight_decay=weight_decay, fused=True)


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients, to be changed in place; of a sparse one the rows that it holds, each once. None becomes zeros."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            found.append(parameter.grad.values())
        else:
            found.append(parameter.grad)
    return found


def apply_gradients(optimizer: torch.optim.AdamW, lr: float) -> None:
    """One step with rate `lr`; the gradients are gone after it."""
    sparse: list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = []
    for group in optimizer.param_groups:
        group["lr"] = lr
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                sparse.append((group, parameter, parameter.grad))
                parameter.grad = None
    optimizer.step()
    for group, parameter, grad in sparse:
        _apply_rows(group, parameter, optimizer.state[parameter], grad)
    optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def _apply_rows(group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any], grad: torch.Tensor) -> None:
    """AdamW of one embedding [V, H] whose coalesced gradient holds some rows."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    indices, values = grad.indices()[0], grad.values()
    size = max(1, ROWS_ELEMENTS // parameter.shape[1])
    dense = torch.empty(min(size, parameter.shape[0]), parameter.shape[1], dtype=grad.dtype, device=grad.device)
    for lower in range(0, parameter.shape[0], size):
        part = parameter[lower : lower + size]
        first, last = torch.searchsorted(indices, torch.tensor([lower, lower + size], device=indices.device)).tolist()
        chunk = dense[: part.shape[0]].zero_()
        chunk[indices[first:last] - lower] = values[first:last]
        adamw(
            [part],
            [chunk],
            [state["exp_avg"][lower : lower + size]],
            [state["exp_avg_sq"][lower : lower + size]],
            [],
            [state["step"].clone()],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
    state["step"] += 1

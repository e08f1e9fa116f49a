"""Ranks that train one model on different rows: each holds all of it, or a share of it (FSDP2).

Whole models sum their gradients after backward, as DDP does but without its averaging: a step's loss is a
sum over the sum of its weights, whoever took which row. A shared model is gathered for each forward and
backward, so every rank joins every one of them, also with nothing to score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from specctl.core.placement import Placement


class Replicas:
    """The ranks of one training run; alone it sums and shares nothing."""

    def __init__(self, placement: Placement, *, is_sharded: bool = False) -> None:
        self.rank, self.size = placement.stage, placement.num_stages
        self.is_sharded = is_sharded and self.size > 1

    def spread(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave this rank its share of `model`, where the model is shared."""
        if not self.is_sharded:
            return
        fully_shard(model, mesh=init_device_mesh(device.type, (self.size,)), reshard_after_forward=True)
        assert isinstance(model, FSDPModule)
        # Sums, not means; and gloo knows no product with a factor.
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum each tensor over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def sum_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """Sum gradients over all ranks; those of a shared model are sums already."""
        if not self.is_sharded:
            self.sum(gradients)

    def norm(self, gradients: Sequence[torch.Tensor]) -> float:
        """The norm of all gradients together, over all ranks' shares."""
        return float(whole(torch.nn.utils.get_total_norm(gradients)))

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


def whole(value: Any) -> Any:
    """`value` with every shared tensor in it gathered, through mappings; every rank has to ask for it."""
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor as `parameter` is held: the rank's share of it where that is shared."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )

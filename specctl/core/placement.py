"""Who stands where among the ranks, and how a model falls onto them. Arithmetic; talks to no rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specctl.errors import NotSupportedError, UsageError


@dataclass(frozen=True, slots=True)
class Placement:
    """Where this process stands: its stage, its tensor-parallel rank, its replica."""

    stage: int = 0
    num_stages: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    replica: int = 0
    num_replicas: int = 1
    local_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        """Whether token ids enter here."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the final norm and the head are here."""
        return self.stage == self.num_stages - 1

    @property
    def is_lead(self) -> bool:
        """Whether this rank names files and writes the manifest for its replica."""
        return self.stage == 0 and self.tp_rank == 0

    @property
    def is_recorder(self) -> bool:
        """Whether this rank records: tensor-parallel ranks hold the same states, one is enough."""
        return self.tp_rank == 0


def check_sizes(pp: int, tp: int) -> None:
    """Raises UsageError or NotSupportedError for sizes that cannot run, before anything loads."""
    for flag, size in (("--pp", pp), ("--tp", tp)):
        if size < 1:
            raise UsageError(f"`{flag} {size}` must be at least 1")
    if pp > 1 and tp > 1:
        raise NotSupportedError(
            f"`--pp {pp}` with `--tp {tp}`: transformers does not split a model along both axes yet",
            hint="use one of the two",
        )


def place(rank: int, size: int, local_rank: int, *, pp: int, tp: int) -> Placement:
    """The placement of `rank` among `size`: replicas of pp x tp consecutive ranks."""
    replica, inner = divmod(rank, pp * tp)
    return Placement(inner // tp, pp, inner % tp, tp, replica, size // (pp * tp), local_rank)


def stage_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage owns; the first stages take the remainder, as transformers does."""
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def distributed_config(placement: Placement) -> Any:
    """transformers' description of the split, or None on one rank."""
    if placement.num_stages * placement.tp_size == 1:
        return None
    from transformers.distributed import DistributedConfig

    return DistributedConfig(pp_size=placement.num_stages, tp_size=placement.tp_size)

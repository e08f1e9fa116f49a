"""Ranks at work: starting them, joining those of torchrun, and what passes between them.

Only this file and `replicas.py` name torch.distributed. A replica is one pipeline (or one tensor-parallel group)
and a process group of its own; replicas never talk, they share a folder.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from specctl.core.device import distributed_backend, pick_device
from specctl.core.placement import Placement, place
from specctl.errors import InterruptedRun, SpecctlError, UsageError
from specctl.records.progress import Reporter, SilentReporter

WAIT = timedelta(hours=12)
"""How long a rank waits for another: reading DATA on rank 0 may take hours."""

MAX_IN_FLIGHT = 2
MAX_UNANSWERED = 64
"""Messages sent and not yet taken: more than any round of decoding has."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that torchrun started, seen from one of them."""

    rank: int
    size: int
    local_rank: int
    store: Any

    def share(self, key: str, value: Any) -> None:
        """Give `value` to the ranks that ask for `key`."""
        self.store.set(key, pickle.dumps(value))

    def receive(self, key: str) -> Any:
        """What some rank shared under `key`, waiting for it."""
        self.store.wait([key], WAIT)
        return pickle.loads(self.store.get(key))  # written by our own ranks, over torchrun's store


def is_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def torchrun_world(pp: int, tp: int) -> World | None:
    """The world of an existing torchrun, or None outside one. Raises UsageError when sizes do not fit."""
    if not is_torchrun():
        return None
    size = int(os.environ["WORLD_SIZE"])
    if size % (pp * tp):
        raise UsageError(
            f"torchrun started {size} ranks, which is no multiple of pp x tp = {pp * tp}",
            hint="ranks beyond pp x tp are replicas that split the samples",
        )
    store, rank, _size = next(iter(rendezvous("env://", timeout=WAIT)))
    return World(rank, size, int(os.environ["LOCAL_RANK"]), store)


def run_in_world(
    world: World, job: Callable[[Placement, Reporter], None], *, pp: int, tp: int, device: str, reporter: Reporter
) -> None:
    """Run `job` as one rank of torchrun's world."""
    placement = place(world.rank, world.size, world.local_rank, pp=pp, tp=tp)
    is_talker = placement.replica == 0 and placement.is_lead
    enter_group(PrefixStore(f"replica{placement.replica}", world.store), placement, device)
    try:
        job(placement, reporter if is_talker else SilentReporter())
        world.share(f"done{world.rank}", True)
        if world.rank == 0:
            for rank in range(world.size):
                world.receive(f"done{rank}")
    finally:
        leave_group()


def enter_group(store: Any, placement: Placement, device: str) -> None:
    """Make this process a rank of its replica's group, over `store`."""
    if device == "cpu":
        # transformers picks the accelerator it sees; a CPU run must not show it one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["LOCAL_RANK"] = str(placement.local_rank)
    torch_device = pick_device(device, placement.local_rank)
    if torch_device.type == "cpu":
        # Ranks that each take every core fight for them; torchrun says how many there are here.
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", placement.num_stages * placement.tp_size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    size = placement.num_stages * placement.tp_size
    rank = placement.stage * placement.tp_size + placement.tp_rank
    dist.init_process_group(distributed_backend(torch_device), store=store, rank=rank, world_size=size, timeout=WAIT)


def file_store(path: str, size: int) -> Any:
    """A store for `size` ranks of this machine in a file: no port that two runs could fight for."""
    return FileStore(path, size)


def leave_group() -> None:
    """End this rank's group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Hop:
    """The stream from the stage before and to the stage after, a batch ahead of the compute.

    Messages carry the batch's number, so that a stream is never taken for another batch's.
    """

    def __init__(self, placement: Placement, device: torch.device, dtype: torch.dtype) -> None:
        self._placement = placement
        self._device, self._dtype = device, dtype
        self._num_expected = self._num_sent = 0
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._expected: deque[tuple[Any, torch.Tensor]] = deque()

    def expect(self, shape: tuple[int, ...]) -> None:
        """Post the receive of the next batch's stream [B, T, D], when there is a stage before."""
        if not self._placement.is_first_stage:
            stream = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._expected.append((dist.irecv(stream, self._placement.stage - 1, tag=self._num_expected), stream))
            self._num_expected += 1

    def receive(self) -> torch.Tensor | None:
        """The stream of the batch expected longest ago; None on the first stage."""
        if self._placement.is_first_stage:
            return None
        work, stream = self._expected.popleft()
        work.wait()
        return stream

    def send(self, stream: torch.Tensor) -> None:
        """Start sending [B, T, D] onward; waits only when two batches are under way."""
        if self._placement.is_last_stage:
            return
        while len(self._sent) >= MAX_IN_FLIGHT:
            self._sent.popleft()[0].wait()
        stream = stream.to(self._dtype).contiguous()
        self._sent.append((dist.isend(stream, self._placement.stage + 1, tag=self._num_sent), stream))
        self._num_sent += 1

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()


class Wire:
    """Tensors from any stage to any other, by tag; counts the bytes that this stage sent.

    Integers travel through the host, other tensors on `device`: the streams of a GPU's ranks go one way alone,
    because NCCL knows no tags and would wait for ever where two ranks send to each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self.bytes_sent = 0

    def send(self, tensor: torch.Tensor, stage: int, *, tag: int) -> None:
        """Start sending; waits only for what was sent long before."""
        while len(self._sent) >= MAX_UNANSWERED:
            self._sent.popleft()[0].wait()
        tensor = (tensor if tensor.is_floating_point() else tensor.cpu()).contiguous()
        self.bytes_sent += tensor.nbytes
        self._sent.append((dist.isend(tensor, stage, tag=tag), tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, stage: int, *, tag: int) -> torch.Tensor:
        """The tensor that `stage` sends under `tag`, waiting for it; integers in host memory."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device if dtype.is_floating_point else "cpu")
        dist.recv(tensor, stage, tag=tag)
        return tensor

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def total(self, value: int, num_ranks: int) -> int:
        """The sum of a number over all ranks."""
        if num_ranks == 1:
            return value
        number = torch.tensor([value])
        dist.all_reduce(number)
        return int(number)


class StageGroup:
    """The recording ranks of one replica, for small objects; safe to use from one other thread."""

    def __init__(self, placement: Placement) -> None:
        self._group = None
        self._size = placement.num_stages
        if placement.num_stages > 1:
            # A group of its own, so that these messages never mix with the streams.
            self._group = dist.new_group(backend="gloo", timeout=WAIT)

    def gather(self, value: Any) -> list[Any]:
        """Every stage's `value`, in stage order, on every stage."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def run(self, step: Callable[[], Any]) -> list[Any]:
        """Run `step` on every stage and gather its results; raise on all what one raised."""
        result: Any = None
        error: BaseException | None = None
        try:
            result = step()
        except (OSError, SpecctlError) as caught:
            error = caught
        outcomes = self.gather((result, error))
        for _result, raised in outcomes:
            if raised is not None:
                raise raised
        return [outcome[0] for outcome in outcomes]


def interrupted(num_shards: int) -> InterruptedRun:
    """What to raise when the user stopped a run that can go on."""
    return InterruptedRun(
        f"interrupted with {num_shards} shards complete",
        hint="run the same command again to continue; nothing complete is lost",
    )

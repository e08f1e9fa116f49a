"""Ranks: starting them, joining those of torchrun, and what passes between them.

The only file that names torch.distributed. A replica is one pipeline (or one tensor-parallel group)
and a process group of its own; replicas never talk, they share a folder.
"""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.distributed.rendezvous import rendezvous

from specctl.core.device import distributed_backend, pick_device
from specctl.errors import InterruptedRun, MachineError, NotSupportedError, SpecctlError, UsageError
from specctl.records.progress import ForwardingReporter, Reporter, SilentReporter

WAIT = timedelta(hours=12)
"""How long a rank waits for another: reading DATA on rank 0 may take hours."""

GRACE_S = 5.0
MAX_IN_FLIGHT = 2


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


class Job(Protocol):
    """What runs on every rank; picklable, so a module-level dataclass with `__call__`."""

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        """Do this rank's part."""


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


def torchrun_world(pp: int, tp: int) -> World | None:
    """The world of an existing torchrun, or None outside one. Raises UsageError when sizes do not fit."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or "RANK" not in os.environ:
        return None
    size = int(os.environ["WORLD_SIZE"])
    if size % (pp * tp):
        raise UsageError(
            f"torchrun started {size} ranks, which is no multiple of pp x tp = {pp * tp}",
            hint="ranks beyond pp x tp are replicas that split the samples",
        )
    store, rank, _size = next(iter(rendezvous("env://", timeout=WAIT)))
    return World(rank, size, int(os.environ["LOCAL_RANK"]), store)


def place(rank: int, size: int, local_rank: int, *, pp: int, tp: int) -> Placement:
    """The placement of `rank` among `size`: replicas of pp x tp consecutive ranks."""
    replica, inner = divmod(rank, pp * tp)
    return Placement(inner // tp, pp, inner % tp, tp, replica, size // (pp * tp), local_rank)


def run_in_world(world: World, job: Job, *, pp: int, tp: int, device: str, reporter: Reporter) -> None:
    """Run `job` as one rank of torchrun's world."""
    placement = place(world.rank, world.size, world.local_rank, pp=pp, tp=tp)
    is_talker = placement.replica == 0 and placement.is_lead
    _enter_group(PrefixStore(f"replica{placement.replica}", world.store), placement, device)
    try:
        job(placement, reporter if is_talker else SilentReporter())
        world.share(f"done{world.rank}", True)
        if world.rank == 0:
            for rank in range(world.size):
                world.receive(f"done{rank}")
    finally:
        _leave_group()


def run_local(job: Job, *, pp: int, tp: int, device: str, reporter: Reporter) -> None:
    """Run `job` on pp x tp ranks of this machine, in this process when that is one.

    Raises what the first failing rank raised; a rank that dies takes the others with it.
    """
    if pp * tp == 1:
        job(Placement(), reporter)
        return
    context = mp.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    send_lock = context.Lock()
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(job, rank, pp, tp, device, f"{folder}/store", sender, send_lock),
                name=f"specctl-rank-{rank}",
                daemon=True,
            )
            for rank in range(pp * tp)
        ]
        try:
            for process in processes:
                process.start()
            sender.close()
            _watch(processes, receiver, reporter)
        finally:
            _end(processes)


def _watch(processes: list[Any], receiver: Any, reporter: Reporter) -> None:
    """Replay the ranks' talk until all have ended; raise what the first failing one said."""
    failures: dict[int, SpecctlError | str] = {}
    is_open = True
    while is_open or any(p.is_alive() for p in processes):
        waitable = [p.sentinel for p in processes if p.is_alive()] + [receiver] * is_open
        ready = multiprocessing.connection.wait(waitable, timeout=1.0)
        if receiver in ready:
            try:
                rank, method, arguments = receiver.recv()
            except EOFError:
                is_open = False
                continue
            if method == "failed":
                failures[rank] = arguments[0]
            else:
                getattr(reporter, method)(*arguments)
        elif failures or any(p.exitcode not in (None, 0) for p in processes):
            _drain(receiver, failures)
            break
    ended = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode not in (None, 0)}
    if failures or ended:
        raise _cause(failures, ended)


def _drain(receiver: Any, failures: dict[int, SpecctlError | str]) -> None:
    """Hear out what ranks sent before they ended, for a moment: the cause may come second."""
    until = time.monotonic() + 1.0
    while receiver.poll(max(0.0, until - time.monotonic())):
        try:
            rank, method, arguments = receiver.recv()
        except EOFError:
            return
        if method == "failed":
            failures.setdefault(rank, arguments[0])


def _cause(failures: dict[int, SpecctlError | str], ended: dict[int, int]) -> Exception:
    """The failure that explains the others: a named error, else a killed rank, else a traceback."""
    for failure in failures.values():
        if isinstance(failure, SpecctlError):
            return failure
    for rank, code in ended.items():
        if code < 0 and rank not in failures:
            name = signal.Signals(-code).name
            why = "most likely out of memory" if name == "SIGKILL" else "it crashed"
            return MachineError(
                f"rank {rank} was ended by {name}, {why}",
                hint="finished shards are kept; run the same command again to continue",
            )
    if failures:
        rank, text = next(iter(failures.items()))
        return RuntimeError(f"rank {rank}: {text}")
    rank, code = next(iter(ended.items()))
    return RuntimeError(f"rank {rank} ended with code {code}")


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    until = time.monotonic() + GRACE_S
    for process in processes:
        if process.pid is not None:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _rank_main(
    job: Job, rank: int, pp: int, tp: int, device: str, store_path: str, sender: Any, send_lock: Any
) -> None:
    # The parent ends its ranks; a Ctrl-C in the terminal reaches them too and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()

    def send(message: tuple[str, tuple[Any, ...]]) -> None:
        with send_lock:
            sender.send((rank, *message))

    placement = place(rank, pp * tp, rank, pp=pp, tp=tp)
    reporter: Reporter = ForwardingReporter(send) if placement.is_lead else SilentReporter()
    try:
        _enter_group(FileStore(store_path, pp * tp), placement, device)
        job(placement, reporter)
        _leave_group()
    except SpecctlError as error:
        send(("failed", (error,)))
        os._exit(error.exit_code)
    except Exception as error:  # the border of the process: the parent decides what it means
        send(("failed", (f"{type(error).__name__}: {error}",)))
        os._exit(1)


def _die_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _enter_group(store: Any, placement: Placement, device: str) -> None:
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


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Hop:
    """The stream from the stage before and to the stage after, a batch ahead of the compute."""

    def __init__(self, placement: Placement, device: torch.device, dtype: torch.dtype) -> None:
        self._placement = placement
        self._device, self._dtype = device, dtype
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._expected: deque[tuple[Any, torch.Tensor]] = deque()

    def expect(self, shape: tuple[int, ...]) -> None:
        """Post the receive of the next batch's stream [B, T, D], when there is a stage before."""
        if not self._placement.is_first_stage:
            stream = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._expected.append((dist.irecv(stream, self._placement.stage - 1), stream))

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
        self._sent.append((dist.isend(stream, self._placement.stage + 1), stream))

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            self._sent.popleft()[0].wait()


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


def interrupted(done: int, total: int) -> InterruptedRun:
    """What to raise when the user stopped a run that can go on."""
    return InterruptedRun(
        f"interrupted with {done} of {total} shards complete",
        hint="run the same command again to continue; nothing complete is lost",
    )


def distributed_config(placement: Placement) -> Any:
    """transformers' description of the split, or None on one rank."""
    if placement.num_stages * placement.tp_size == 1:
        return None
    from transformers.distributed import DistributedConfig

    return DistributedConfig(pp_size=placement.num_stages, tp_size=placement.tp_size)


def stage_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage owns; the first stages take the remainder, as transformers does."""
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]

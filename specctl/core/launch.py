"""Starts local ranks, hears what they say, and ends them all when one ends. Knows processes, not tensors."""

from __future__ import annotations

import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from specctl.core.parallel import enter_group, file_store, leave_group
from specctl.core.placement import Placement, place
from specctl.core.pulse import PULSE
from specctl.errors import MachineError, SpecctlError
from specctl.records.progress import ForwardingReporter, Reporter, SilentReporter

GRACE_S = 5.0
BEAT_S = 2.0
START_S = 90.0
"""Until a rank must have shown a first sign of life: it imports before, which takes long on a busy machine."""


class Job(Protocol):
    """What runs on every rank; picklable, so a module-level dataclass with `__call__`."""

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        """Do this rank's part."""


def run_local(job: Job, *, pp: int, tp: int, device: str, reporter: Reporter, silence_s: float | None = None) -> None:
    """Run `job` on pp x tp ranks of this machine, in this process when that is one.

    Raises what the first failing rank raised; a rank that dies takes the others with it. With `silence_s` so
    does one that shows no sign of life for so many seconds, or that does not get on (core/pulse.py).
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
                args=(job, rank, pp, tp, device, f"{folder}/store", sender, send_lock, silence_s),
                name=f"specctl-rank-{rank}",
                daemon=True,
            )
            for rank in range(pp * tp)
        ]
        try:
            _start(processes)
            sender.close()
            _watch(processes, receiver, reporter, silence_s)
        finally:
            _end(processes)


def _start(processes: list[Any]) -> None:
    """Start them deaf to a Ctrl-C in the terminal: it reaches them too, and while they import they would say so."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for process in processes:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _watch(processes: list[Any], receiver: Any, reporter: Reporter, silence_s: float | None) -> None:
    """Replay the ranks' talk until all have ended; raise what the first failing one said."""
    failures: dict[int, SpecctlError | str] = {}
    # The first sign of life may come so much later.
    heard = dict.fromkeys(range(len(processes)), time.monotonic() + START_S - (silence_s or 0.0))
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
            heard[rank] = time.monotonic()
            if method == "failed":
                failures[rank] = arguments[0]
            elif method != "beat":
                getattr(reporter, method)(*arguments)
        elif failures or any(p.exitcode not in (None, 0) for p in processes):
            _drain(receiver, failures)
            break
        if silence_s is not None:
            _refuse_silence(processes, heard, silence_s)
    ended = {rank: p.exitcode for rank, p in enumerate(processes) if p.exitcode not in (None, 0)}
    if failures or ended:
        raise _cause(failures, ended)


def _refuse_silence(processes: list[Any], heard: dict[int, float], silence_s: float) -> None:
    """Raises MachineError for a living rank that is not heard, and ends it."""
    for rank, last in heard.items():
        if processes[rank].is_alive() and time.monotonic() - last > silence_s:
            processes[rank].kill()  # it would not hear a gentler word
            raise MachineError(
                f"rank {rank} hangs: no sign of life for more than {silence_s:.0f} s",
                hint="the other ranks were ended too",
            )


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
    for rank, failure in failures.items():
        if isinstance(failure, MachineError):
            return MachineError(f"rank {rank}: {failure.message}", where=failure.where, hint=failure.hint)
        if isinstance(failure, SpecctlError):
            return failure
    for rank, code in ended.items():
        if code < 0 and rank not in failures:
            name = signal.Signals(-code).name
            why = "most likely out of memory" if name == "SIGKILL" else "it crashed"
            return MachineError(
                f"rank {rank} was ended by {name}, {why}",
                hint="run the same command again; what was finished is kept",
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
    job: Job,
    rank: int,
    pp: int,
    tp: int,
    device: str,
    store_path: str,
    sender: Any,
    send_lock: Any,
    silence_s: float | None,
) -> None:
    # The parent ends its ranks; a Ctrl-C in the terminal reaches them too and must not.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()

    def send(message: tuple[str, tuple[Any, ...]]) -> None:
        with send_lock:
            sender.send((rank, *message))

    if silence_s is not None:
        threading.Thread(target=_beat, args=(send, silence_s), daemon=True).start()
    placement = place(rank, pp * tp, rank, pp=pp, tp=tp)
    reporter: Reporter = ForwardingReporter(send) if placement.is_lead else SilentReporter()
    try:
        enter_group(file_store(store_path, pp * tp), placement, device)
        job(placement, reporter)
        leave_group()
    except SpecctlError as error:
        send(("failed", (error,)))
        os._exit(error.exit_code)
    except Exception as error:  # the border of the process: the parent decides what it means
        send(("failed", (f"{type(error).__name__}: {error}",)))
        os._exit(1)


def _beat(send: Callable[[tuple[str, tuple[Any, ...]]], None], silence_s: float) -> None:
    while (seconds := PULSE.stuck_for(silence_s)) is None:
        send(("beat", ()))
        time.sleep(BEAT_S)
    hangs = MachineError(f"hangs: a step goes on for {seconds:.0f} s", hint="the other ranks were ended too")
    send(("failed", (hangs,)))
    os._exit(hangs.exit_code)


def _die_with_parent() -> None:
    parent = mp.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

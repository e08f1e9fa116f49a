"""Starts a server, hears when it is ready or dies, and ends all of it. Knows processes, not HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specctl.engines._command import shown
from specctl.errors import MachineError, SpecctlError
from specctl.records.progress import Reporter

GRACE_S: Final = 15.0
"""A server that is asked to end gets so long to free its devices."""
SHORT_GRACE_S: Final = 3.0
"""The same after an error or a Ctrl-C: vLLM is deaf to SIGTERM while it starts, and somebody waits."""
POLL_S: Final = 0.2
LINE_EVERY_S: Final = 15.0
LAST_BYTES: Final = 1 << 18
SHOWN: Final = 300

_TRAMPOLINE: Final = (
    "import ctypes,os,sys\n"
    "if sys.platform=='linux': ctypes.CDLL(None).prctl(1,15)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])"
)
"""Becomes the server. The kernel sends it SIGTERM when specctl dies without a word (prctl PR_SET_PDEATHSIG)."""

_TELLING: Final = re.compile(r"\b\w*(?:Error|Exception|error): \S")
_PREFIX: Final = re.compile(r"\(\w+ pid=\d+\) (?:[A-Z]+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] )?")
"""What vLLM puts before each line: the process, the level, the time and the place."""

_HOLLOW: Final = ("See root cause above", "See stack trace", "HTTPException")


@dataclass(frozen=True, slots=True)
class Process:
    """A server that was started: its leader, whose session all its workers are in, and its log."""

    title: str
    leader: subprocess.Popen[bytes]
    log: Path

    def cause(self, while_doing: str) -> MachineError | None:
        """Why it died, None while it lives."""
        code = self.leader.poll()
        if code is None:
            return None
        ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return MachineError(f"{self.title} {ended} while {while_doing}: {telling_line(self.log)}")


def free_port() -> int:
    """A port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(command: Sequence[str], title: str, environment: Mapping[str, str]) -> Iterator[Process]:
    """A started server; at the end it and its workers are gone, whatever happened.

    Its log is deleted, but for a SpecctlError, which then says where it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="specctl-server-"))
    log = folder / "server.log"
    is_kept = False
    try:
        leader = _start(command, log, environment)
        grace_s = SHORT_GRACE_S
        try:
            yield Process(title, leader, log)
            grace_s = GRACE_S
        finally:
            _end(leader, grace_s)
    except SpecctlError as error:
        is_kept = True
        hint = f"{error.hint}; the server's log" if error.hint else "the server's log"
        raise type(error)(error.message, where=error.where, hint=f"{hint} is {log}") from error
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


def wait_until(is_ready: Callable[[], bool], process: Process, *, timeout_s: float, reporter: Reporter) -> None:
    """Returns when the server is ready. Raises MachineError when it died or took longer than it may."""
    began = spoken = time.monotonic()
    while not _is_its_own(is_ready, process):
        now = time.monotonic()
        if now - began > timeout_s:
            raise MachineError(
                f"{process.title} was not ready within {timeout_s:g} s: {last_line(process.log)}",
                hint="`server_timeout` in the `--config` file sets the seconds",
            )
        if now - spoken > LINE_EVERY_S:
            spoken = now
            reporter.note(f"{process.title} starts, {now - began:.0f} s; it says: {last_line(process.log)}")
        time.sleep(POLL_S)


def _is_its_own(is_ready: Callable[[], bool], process: Process) -> bool:
    """Whether it is ready. Where it died, another server may answer in its place, just now even."""
    _raise_death(process)
    is_up = is_ready()
    _raise_death(process)
    return is_up


def _raise_death(process: Process) -> None:
    cause = process.cause("it started")
    if cause is not None:
        raise cause


def telling_line(log: Path) -> str:
    """The last line that names an error and does not point to another one, else the last one."""
    lines = _last_lines(log)
    telling = [line for line in lines if _TELLING.search(line) and not any(words in line for words in _HOLLOW)]
    return _PREFIX.sub("", (telling or lines or ["it said nothing"])[-1])[:SHOWN]


def last_line(log: Path) -> str:
    """The last thing that the server said."""
    return _PREFIX.sub("", (_last_lines(log) or ["it has said nothing yet"])[-1])[:SHOWN]


def _last_lines(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    trampoline = [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, str(os.getpid()), *command]
    log.touch(mode=0o600)
    with log.open("wb") as output:
        output.write(f"$ {shown(command)}\n".encode())
        output.flush()
        return subprocess.Popen(
            trampoline,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def _end(leader: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask every process of the session to end, then end it. A second Ctrl-C cuts the grace short."""
    try:
        _signal(leader, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while time.monotonic() < until and (leader.poll() is None or _members(leader.pid)):
            time.sleep(0.05)
    finally:
        _signal(leader, signal.SIGKILL)
        leader.wait()
        while _members(leader.pid):  # the kernel takes a moment
            time.sleep(0.01)


def _signal(leader: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Every process of the leader's session; its process group where there is no /proc."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not Path("/proc/self/stat").exists():
            os.killpg(leader.pid, number)
    for pid in _members(leader.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _members(session: int) -> set[int]:
    """Living processes of a session, by /proc; zombies that nobody collects do not count."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything: fields are counted after the last one.
            state, _parent, _group, its_session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(its_session) == session and state != "Z":
            found.add(int(entry.parent.name))
    return found

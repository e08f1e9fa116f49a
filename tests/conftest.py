"""What tests share: tiny real targets, chats, and specctl as a real process."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from fixtures.make import make_tiny  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Started in the background, the tests would hand an ignored Ctrl-C on to the processes that they interrupt."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    """Tiny models on many threads only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], str]:
    """The folder of a tiny target by family name (see fixtures/make.py)."""
    return lambda name: str(make_tiny(name))


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m specctl` as a real process."""

    def run(*args: object, input: str | None = None, env: dict[str, str] | None = None, timeout: float = 120):
        return subprocess.run(
            [sys.executable, "-m", "specctl", *map(str, args)],
            input=input,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **(env or {})},
            timeout=timeout,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )

    return run


WORDS = ["the", "tide", "comes", "in", "at", "noon", "and", "boats", "go", "out", "with", "it", "to", "fish"]


def chat_rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """`count` two-turn chats of mixed length."""
    import random

    rng = random.Random(seed)

    def text(longest: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))

    return [
        {
            "id": f"chat-{seed}-{i}",
            "messages": [{"role": "user", "content": text(8)}, {"role": "assistant", "content": text(20)}],
        }
        for i in range(count)
    ]


@pytest.fixture
def chats(tmp_path: Path) -> Callable[..., str]:
    """Write chats as JSONL and give the path."""

    def write(count: int = 12, seed: int = 0, name: str = "chats.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(count, seed)))
        return str(path)

    return write

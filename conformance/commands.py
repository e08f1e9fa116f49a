"""Runs specctl as a user does, and reads what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.records.evaluation import EvalResult
from specctl.records.evaluationfile import result_from_dict

ANSWERS = (0, 1, 3)
"""Exit codes of a measurement that ran."""

LIMIT_S = 900
"""No command here needs so long on two cores; one that does is stuck."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is judged, by which vLLM, and where files may lie."""

    venv: Path
    target: Path
    eagle3: Path
    peagle: Path
    chats: Path
    folder: Path

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def specctl(*arguments: object, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a command with `--json` prints. Raises RuntimeError for one that could not."""
    command = [sys.executable, "-m", "specctl", *map(str, arguments), "--json"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        check=False,
        timeout=LIMIT_S,
    )
    if ran.returncode not in ANSWERS:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def measured(
    asked: Asked,
    draft: Path | None,
    *arguments: object,
    engine: str = "reference",
    environment: Mapping[str, str] | None = None,
) -> EvalResult:
    """What `specctl eval` measures of a draft, on 16 prompts of 64 tokens in float32 unless told otherwise."""
    defaults = ["--prompts", "mt-bench", "--limit", 16, "--max-new-tokens", 64, "--dtype", "float32", "--batch", 8]
    chosen = [str(item) for item in arguments]
    kept = [x for pair in zip(defaults[::2], defaults[1::2], strict=True) if str(pair[0]) not in chosen for x in pair]
    which: list[object] = ["--no-spec"] if draft is None else []
    paths: list[object] = [asked.target, *([] if draft is None else [draft])]
    if engine == "vllm" and "--server-command" not in chosen:
        chosen += ["--server-venv", str(asked.venv)]
    found = specctl("eval", *paths, *which, "--engine", engine, *kept, *chosen, environment=environment)
    return result_from_dict(found, "what specctl eval printed")

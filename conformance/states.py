"""Hidden states that vLLM hands out against those that specctl records itself."""

from __future__ import annotations

from conformance.commands import Asked, specctl
from conformance.rows import Row

SLOTS = "2,15,27,last,norm"
LEAST_COSINE = 0.99999


def states(asked: Asked) -> list[Row]:
    """Every slot of a few chats in float32, by the worst token."""
    folder = asked.folder / "states"
    for engine in ("reference", "vllm"):
        more = ("--server-venv", asked.venv) if engine == "vllm" else ()
        chosen = ("--layers", SLOTS, "--dtype", "float32", "--limit", 8, "--engine", engine, *more)
        specctl("extract", asked.target, asked.chats, "--out", folder / engine, *chosen)
    found = specctl("inspect", folder / "reference", "--compare", folder / "vllm")["report"]
    missing = found["missing"]
    rows = [Row("samples", "the same", f"{found['samples']}, {missing} missing", missing == 0)]
    for slot in found["slots"]:
        cosine, difference = slot["min_cosine"], slot["max_difference"]
        seen = f"cosine {cosine:.7f}, largest difference {difference:.2g}"
        rows.append(Row(f"slot `{slot['slot']}`", f"cosine >= {LEAST_COSINE}", seen, cosine >= LEAST_COSINE))
    return rows

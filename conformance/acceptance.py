"""The same prompts through vLLM and through specctl's own engine: texts, drafts and what was accepted."""

from __future__ import annotations

import os
from pathlib import Path

from conformance.commands import Asked, measured, specctl
from conformance.rows import Row
from specctl.core.intervals import acceptance_length, add, by_prompt
from specctl.recipes.judge import compare
from specctl.records.evaluation import Counts, EvalResult, PromptResult, SizeResult

STAGES = Path(__file__).parent / "stages"
FEW = ("--limit", 4)
SERVER = "-m vllm.entrypoints.openai.api_server"


def acceptance(asked: Asked) -> list[Row]:
    """Both heads in float32: counts per position equal, texts the server's own, stages of our engine alike."""
    plain = measured(asked, None, engine="vllm").sizes[0]
    rows = []
    for name, draft in (("EAGLE-3", asked.eagle3), ("P-EAGLE", asked.peagle)):
        served = measured(asked, draft, engine="vllm").sizes[0]
        own = measured(asked, draft, "--pp", 1, "--pp", 2).sizes
        rows += [
            _texts(f"{name}: vLLM's text with the head", served, "its text without", plain),
            _counts(f"{name}: drafts and accepted per position, vLLM", served, "specctl's engine", own[0]),
            _counts(f"{name}: the same, specctl over two stages", own[1], "specctl's engine", own[0]),
        ]
    return rows


def converted(asked: Asked) -> list[Row]:
    """Heads that `convert` wrote load as they are and do what those of `train` do."""
    folder, target = asked.folder / "converted", asked.target
    specctl("convert", asked.eagle3, folder / "speculators", "--to", "speculators", "--target", target)
    specctl("convert", asked.peagle, folder / "nemo", "--to", "nemo", "--target", target)
    specctl("convert", folder / "nemo", folder / "back", "--to", "vllm", "--target", target, "--aux-layers", "aux")
    rows = []
    for name, draft, first in (
        ("EAGLE-3 as speculators writes it", folder / "speculators", asked.eagle3),
        ("P-EAGLE, to NeMo's layout and back", folder / "back", asked.peagle),
    ):
        served = measured(asked, draft, *FEW, engine="vllm").sizes[0]
        own = measured(asked, first, *FEW).sizes[0]
        rows.append(_counts(f"{name}, vLLM", served, "the head of `train`, specctl's engine", own))
        rows.append(_texts(f"{name}, vLLM: the text", served, "specctl's without a server", own))
    return rows


def rounding(asked: Asked) -> list[Row]:
    """In bfloat16 texts part where logits tie; acceptance agrees within the paired interval."""
    rows = []
    for name, draft in (("EAGLE-3", asked.eagle3), ("P-EAGLE", asked.peagle)):
        served = measured(asked, draft, "--dtype", "bfloat16", engine="vllm")
        own = measured(asked, draft, "--dtype", "bfloat16")
        found = compare(own, served, tolerance=0.05, names=("specctl", "vLLM")).rows[1].difference
        assert found is not None and found.relative_low is not None and found.relative_high is not None
        interval = f"{found.relative_low:+.1%} to {found.relative_high:+.1%}"
        lengths = f"{_length(served.sizes[0]):.3f} and {_length(own.sizes[0]):.3f}"
        seen = f"{lengths}; {found.relative:+.1%}, paired interval {interval}"
        holds = found.relative_low <= 0 <= found.relative_high
        rows.append(Row(f"{name}: acceptance length, vLLM and specctl", "no difference", seen, holds))
    return rows


def stages(asked: Asked) -> list[Row]:
    """EAGLE-3 over two and three stages of vLLM, by its V2 runner with kernels interpreted."""
    own = measured(asked, asked.eagle3, "--pp", 1, "--pp", 2).sizes
    rows = []
    for pp, cores in ((2, "0|1"), (3, "0|1|0")):
        served = _served_over(asked, pp, cores)
        size = served.sizes[0]
        wanted = own[1 if pp == 2 else 0]
        name = f"EAGLE-3 over {pp} stages of vLLM: drafts and accepted per position"
        rows.append(_counts(name, size, "specctl over two stages" if pp == 2 else "specctl's engine", wanted))
        rows.append(_texts(f"EAGLE-3 over {pp} stages of vLLM: the text", size, "specctl's", wanted))
    return rows


def _served_over(asked: Asked, pp: int, cores: str) -> EvalResult:
    environment = {
        "PYTHONPATH": os.pathsep.join((str(STAGES), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "120",
    }
    few = FEW if pp > 2 else ()
    command = f"{asked.python} {SERVER}"
    more = ("--server-command", command, "--server-args", "--kv-cache-memory-bytes 536870912")
    return measured(asked, asked.eagle3, "--pp", pp, *few, *more, engine="vllm", environment=environment)


def _texts(what: str, size: SizeResult, against: str, other: SizeResult) -> Row:
    """Whether every text of a size is that of another for the same prompt."""
    wanted = {result.id: result.tokens for result in other.results}
    differing = [r.id for r in size.results if r.tokens != wanted[r.id]]
    tokens = sum(len(result.tokens) for result in size.results)
    seen = f"{len(differing)} of {len(size.results)} texts differ, {tokens:,} tokens"
    return Row(what, f"equal to {against}", seen, not differing)


def _counts(what: str, size: SizeResult, against: str, other: SizeResult) -> Row:
    """Whether a size drafted and accepted what another did, prompt by prompt and position by position."""
    wanted = {result.id: _of(result) for result in other.results}
    differing = [r.id for r in size.results if _of(r) != wanted[r.id]]
    whole = _whole(size)
    seen = f"{whole.num_drafts:,} drafts, {'/'.join(map(str, whole.accepted))}, length {_length(size):.4f}"
    if differing:
        theirs = _whole(other)
        seen += f"; {against}: {theirs.num_drafts:,}, {'/'.join(map(str, theirs.accepted))}"
    return Row(what, f"equal to {against}, prompt by prompt", seen, not differing)


def _of(result: PromptResult) -> tuple[object, ...]:
    counts = result.counts()
    longest = max((i + 1 for i, count in enumerate(counts.accepted) if count), default=0)
    return result.prompt_ids, counts.num_drafts, sum(counts.proposed), counts.accepted[:longest]


def _whole(size: SizeResult) -> Counts:
    return add([result.counts() for result in size.results])


def _length(size: SizeResult) -> float:
    value = acceptance_length(list(by_prompt(size.results).values())).value
    assert value is not None
    return value

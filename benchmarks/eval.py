"""How fast `specctl eval` decodes, as ratios within one run, batch 1.

    make bench-eval DRAFT=run/draft     (SmolLM2, an EAGLE-3 draft for it, both dtypes)

(a) plain decoding against `generate` of transformers; (b) speculative against plain decoding, for K of 1 to 4,
and against transformers' assisted generation by prompt lookup; (c) the share of a step outside the two models;
(d) pipeline stages on the same cores, and the bytes between them against the least needed. Rounds alternate and
the fastest counts, because the machine may be shared. Exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from specctl.core.decode import decode_rows  # noqa: E402
from specctl.core.decodejob import DecodeJob, read_outcome  # noqa: E402
from specctl.core.device import DTYPES  # noqa: E402
from specctl.core.draftload import build_draft, draft_slots, read_draft  # noqa: E402
from specctl.core.draftrows import DraftRows  # noqa: E402
from specctl.core.launch import run_local  # noqa: E402
from specctl.core.parallel import Wire  # noqa: E402
from specctl.core.placement import Placement  # noqa: E402
from specctl.core.prompts import open_prompts, prompt_file, read_dialogues  # noqa: E402
from specctl.core.speculate import Decoded, DecodeSettings, Request  # noqa: E402
from specctl.core.target import describe_target, load_target  # noqa: E402
from specctl.core.targetrows import TargetRows  # noqa: E402
from specctl.core.teaching import read_parts  # noqa: E402
from specctl.records.progress import SilentReporter  # noqa: E402

CPU = torch.device("cpu")
PLAIN_BOUND, SPECULATIVE_BOUND, OVERHEAD_BOUND = 1.0, 1.0, 0.10


class Clock:
    """Seconds spent inside the two models; a class because calls of both add to it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Any) -> Any:
        """`call`, whose time is added."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return inner


class Engine:
    """A loaded target and draft, and the prompts they are timed on."""

    def __init__(self, target: str, draft: str, dtype: str, requests: Sequence[Request]) -> None:
        self.spec, self.requests, self.dtype, self.clock = describe_target(target), requests, dtype, Clock()
        self.target = load_target(self.spec, dtype=dtype, device=CPU)
        parts = read_parts(target)
        head, tensors = read_draft(draft, parts)
        self.slots = draft_slots(head, draft)
        self.draft = build_draft(head, tensors, parts, dtype=DTYPES[dtype], device=CPU)

    def decode(self, num_tokens: int, num_draft_tokens: int) -> tuple[list[Decoded], float]:
        """All prompts by specctl's engine, and seconds."""
        settings = DecodeSettings(num_tokens, num_draft_tokens)
        slots = self.slots if num_draft_tokens else ()
        with TargetRows(self.target, slots, Placement()) as rows:
            rows.run = self.clock.timed(rows.run)  # type: ignore[method-assign]
            rows.logits = self.clock.timed(rows.logits)  # type: ignore[method-assign]
            wire, reporter = Wire(CPU), SilentReporter()
            self.clock.seconds, began = 0.0, time.perf_counter()
            found = decode_rows(
                rows, self.draft, self.requests, settings=settings, batch=1, wire=wire, reporter=reporter
            )
            return found, time.perf_counter() - began

    def generate(self, num_tokens: int, **more: Any) -> tuple[list[tuple[int, ...]], float]:
        """All prompts by `generate` of transformers, and seconds."""
        model: Any = self.target.model
        began, texts = time.perf_counter(), []
        for request in self.requests:
            ids = torch.tensor([request.prompt])
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_tokens,
                    # Neither ends at a stop token; `min_new_tokens` would forbid it and change the text.
                    eos_token_id=None,
                    do_sample=False,
                    pad_token_id=0,
                    **more,
                )
            texts.append(tuple(out[0, len(request.prompt) :].tolist()))
        return texts, time.perf_counter() - began


def measure(engine: Engine, arguments: argparse.Namespace) -> list[str]:
    """Print the table of one dtype; what missed its bound."""
    tokens, best = arguments.max_new_tokens, dict[str, float]()
    overhead, lengths = dict[str, float](), dict[str, float]()
    DraftRows.propose = engine.clock.timed(DraftRows.propose)  # type: ignore[method-assign]

    def keep(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, float("inf")), seconds)

    for _ in range(arguments.rounds):
        plain, seconds = engine.decode(tokens, 0)
        keep("plain", seconds)
        texts, seconds = engine.generate(tokens)
        keep("generate", seconds)
        same = sum(one.tokens == other for one, other in zip(plain, texts, strict=True))
        keep("prompt lookup", engine.generate(tokens, prompt_lookup_num_tokens=3)[1])
        for k in range(1, 5):
            found, seconds = engine.decode(tokens, k)
            keep(f"K {k}", seconds)
            steps = [step for decoded in found for step in decoded.steps]
            lengths[f"K {k}"] = 1 + sum(step.accepted for step in steps) / len(steps)
            share = 1 - engine.clock.seconds / seconds
            overhead[f"K {k}"] = min(overhead.get(f"K {k}", 1.0), share)
    total = tokens * len(engine.requests)
    print(f"{engine.dtype}: {len(engine.requests)} prompts x {tokens} tokens; text equal to generate's: {same}")
    for name, seconds in best.items():
        more = (
            f"acceptance length {lengths[name]:.3f}  outside the models {overhead[name]:.1%}" if name in lengths else ""
        )
        print(f"  {name:14s} {total / seconds:7.1f} tokens/s  {best['plain'] / seconds:5.2f} x plain  {more}")
    fastest = min(lengths, key=lambda name: best[name])
    print(f"  recommended: {fastest}; against assisted generation {best['prompt lookup'] / best[fastest]:.2f} x")
    bounds = [
        ("plain against generate", best["generate"] / best["plain"], PLAIN_BOUND),
        (f"{fastest} against plain", best["plain"] / best[fastest], SPECULATIVE_BOUND),
        ("1 - share outside the models", 1 - overhead[fastest], 1 - OVERHEAD_BOUND),
    ]
    return [f"{engine.dtype} {name}: {value:.2f}, wanted {bound}" for name, value, bound in bounds if value < bound]


def stages(engine: Engine, draft: str, num_tokens: int) -> None:
    """The same decoding on one and two stages, on the same cores, and what goes between them."""
    seconds = {}
    for pp in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            job = DecodeJob(
                spec=engine.spec,
                draft=draft,
                requests=tuple(engine.requests),
                settings=DecodeSettings(num_tokens, 3),
                batch=1,
                dtype=engine.dtype,
                device="cpu",
                out=f"{folder}/outcome",
            )
            run_local(job, pp=pp, tp=1, device="cpu", reporter=SilentReporter())
            outcome = read_outcome(Path(job.out))
        seconds[pp] = outcome.seconds
    item, size = DTYPES[engine.dtype].itemsize, engine.spec.hidden_size
    half = engine.spec.num_layers - engine.spec.num_layers // 2
    columns = sum(len(r.prompt) for r in engine.requests) + sum(4 * len(d.steps) for d in outcome.decoded)
    # A state that lies where the stages meet is the stream itself.
    width = size * (1 + sum(int(slot) < half for slot in engine.slots if slot != "norm"))
    least = columns * (width * item + 8)
    print(
        f"  PP 2 in {seconds[2] / seconds[1]:.2f} of PP 1's time on the same cores; "
        f"{outcome.bytes_sent:,} bytes between stages, {outcome.bytes_sent / least:.3f} of stream, states and ids alone"
    )


def main() -> int:
    """Measure and print; 0 where all bounds hold and 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / ".cache/targets/smollm2"))
    parser.add_argument("--draft", required=True, help="an EAGLE-3 or P-EAGLE draft of the target")
    parser.add_argument("--prompts", default="gsm8k", help="a set or a file, as `specctl eval --prompts`")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    encoder = open_prompts(describe_target(arguments.target))
    requests = []
    for asked in read_dialogues(prompt_file(arguments.prompts), arguments.limit, 0):
        ids = encoder.encode(asked, (), arguments.max_new_tokens)
        requests += [Request(asked.key, ids)] if ids else []
    missed = []
    for dtype in ("float32", "bfloat16"):
        engine = Engine(arguments.target, arguments.draft, dtype, requests)
        missed += measure(engine, arguments)
        stages(engine, arguments.draft, arguments.max_new_tokens)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

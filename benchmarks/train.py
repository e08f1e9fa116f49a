"""What a training step costs: against speculators 0.9.0, and as rows grow.

    make bench-train     (their step and ours on the same batch, interleaved; about 15 minutes on two shared cores)
    make bench-growth    (ours alone, from 512 to 8,192 tokens; about 15 minutes)

Each measurement is a process of its own on one thread. Times are CPU seconds of the process, the fastest
step of all rounds; memory is the process's peak. Exit code 1 where a bound is missed, or where the two
sides did not do the same work: as many elements at each depth, and the same loss before the first update.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import speculators_step as shared  # noqa: E402
from speculators_step import Run, Step, Update  # noqa: E402

from specctl.cli.app import KERNEL_CACHES, KERNELS_KEPT  # noqa: E402

TIME_BOUND, MEMORY_BOUND, GROWTH_BOUND = 0.6, 0.8, 1.25
SAME = 0.01
"""How far the two sides may differ in elements and in loss: P-EAGLE's depths are drawn, and bfloat16 rounds."""
OURS, OURS_FROZEN = "specctl, head trained", "specctl, head frozen"
LIKE = {OURS_FROZEN: "speculators", OURS: "speculators, head trained"}
"""Which of their steps does the work of which of ours: they leave the draft's head as it is, unless told."""
ALGORITHMS = {"eagle3": 3, "peagle": 4}
GROWTH = (("eagle3", 3), ("peagle", 4), ("peagle", 8))
TOKENS = (512, 2048, 4096, 8192)
PIECE = 512

Result = dict[str, Any]
Table = list[tuple[str, ...]]


def our_step(run: Run, head_file: Path) -> tuple[torch.nn.Module, Step]:
    """specctl's model and step.

    Variant `own` trains the draft's head, `frozen` does not; both have the target's greedy tokens, as the loader
    keeps them, and the target's head in a file. `first` finds them in the step, as in a first epoch.
    """
    from specctl.core.device import release_mapped
    from specctl.core.losses import make_teacher
    from specctl.drafts import eagle3, peagle
    from specctl.records.draft import DraftBatch, DraftSettings

    model, parts, ids = our_model(run), shared.make_batch(run), shared.draft_ids()
    head = torch.from_file(str(head_file), size=shared.VOCAB * shared.HIDDEN).view(shared.VOCAB, shared.HIDDEN)
    teacher = make_teacher(head, ids, dtype=parts.aux.dtype)
    release_mapped(head)
    final = torch.nn.functional.rms_norm(parts.final.float(), (shared.HIDDEN,), eps=shared.EPS).to(parts.final.dtype)
    # Which tokens they are changes what counts as a hit and no cost.
    known = None if run.variant == "first" else torch.zeros(run.tokens, dtype=torch.int64)
    offsets = tuple(range(0, run.tokens + 1, run.document))
    batch = DraftBatch(parts.ids, offsets, parts.mask, parts.aux, final, known)
    settings = DraftSettings(run.depths, depth_decay=1.0, cod_ratio=shared.COD_RATIO, cod_floor=shared.COD_FLOOR)
    algorithm = eagle3 if run.algorithm == "eagle3" else peagle

    def step(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        with shared.autocast(run):
            report = algorithm.training_loss(model, batch, teacher=teacher, settings=settings, generator=generator)
        (report.loss / report.weight).backward()
        return report.loss.detach() / report.weight, report.counts

    return model, step


def our_model(run: Run) -> Any:
    """specctl's draft of the same layer, its weights filled."""
    from specctl.core.modules import DraftModel
    from specctl.records.head import HeadConfig

    head = HeadConfig(
        block="llama",
        hidden_size=shared.HIDDEN,
        intermediate_size=shared.INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=shared.HEADS,
        num_key_value_heads=shared.KV_HEADS,
        head_dim=shared.HEAD_DIM,
        vocab_size=shared.VOCAB,
        draft_vocab_size=shared.DRAFT_VOCAB,
        target_hidden_size=shared.HIDDEN,
        num_aux=len(shared.AUX_IDS),
        aux_ids=shared.AUX_IDS,
        rms_norm_eps=shared.EPS,
        hidden_act="silu",
        rope=shared.ROPE,
        max_position_embeddings=8192,
        parallel_drafting=run.algorithm == "peagle",
        mask_token_id=shared.RESERVED_ID if run.algorithm == "peagle" else None,
    )
    model = DraftModel(head)
    model.set_vocabulary(shared.draft_ids())
    shared.fill_model(model)
    is_parallel = run.algorithm == "peagle"
    model.embed_tokens.weight.requires_grad_(is_parallel)
    model.embeds_sparsely = is_parallel
    model.lm_head.weight.requires_grad_(run.variant != "frozen")
    return model


def our_update(model: torch.nn.Module) -> Update:
    """specctl's clip and AdamW."""
    from specctl.core.optimizer import apply_gradients, gradients_of, make_optimizer

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained, lr=shared.LR, betas=(0.9, 0.999), weight_decay=0.01)

    def update() -> None:
        gradients = gradients_of(trained)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, min(1.0, 1.0 / (norm + 1e-6)))
        apply_gradients(optimizer, shared.LR)

    return update


def in_process(run: Run, python: Path, script: Path, *flags: str) -> Result:
    """The result of `run` in a process of its own, on one thread. Raises CalledProcessError."""
    kernels = dict.fromkeys(KERNEL_CACHES, KERNELS_KEPT) if script == Path(__file__) else {}  # as `specctl` starts
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **kernels}
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(script), *flags, json.dumps(asdict(run))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: Result = {**asdict(run), **json.loads(done.stdout.splitlines()[-1])}
    print(script.name, result, file=sys.stderr, flush=True)
    return result


def ours(run: Run) -> Result:
    """Our step, measured; the target's head lies in a file that the process before made."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "head.bin"
        shared.target_head().numpy().tofile(file)
        return in_process(run, Path(sys.executable), Path(__file__), "--head", str(file), "--ours")


def theirs(run: Run, venv: Path) -> Result:
    """Their step, measured."""
    return in_process(run, venv / "bin/python", Path(shared.__file__))


def fastest(results: Sequence[Result]) -> Result:
    """The fastest of some rounds, with the least peak of all."""
    best = min(results, key=lambda result: result["seconds"])
    return {**best, "peak": min(result["peak"] for result in results)}


def compare(algorithm: str, dtype: str, venv: Path, rounds: int) -> dict[str, Result]:
    """Each side and variant by name, its rounds interleaved with the others'."""
    run = Run(algorithm, dtype, "own", ALGORITHMS[algorithm])
    found: dict[str, list[Result]] = {}
    for _ in range(rounds):
        found.setdefault("speculators", []).append(theirs(run, venv))
        found.setdefault(OURS_FROZEN, []).append(ours(replace(run, variant="frozen")))
        found.setdefault("speculators, head trained", []).append(theirs(replace(run, variant="head"), venv))
        found.setdefault(OURS, []).append(ours(run))
        found.setdefault("specctl, head trained, first epoch", []).append(ours(replace(run, variant="first")))
    return {name: fastest(results) for name, results in found.items()}


def differs(one: Result, other: Result) -> bool:
    """Whether two sides did different work."""
    pairs = [(one["loss"], other["loss"]), *zip(one["elements"], other["elements"], strict=True)]
    return any(abs(a - b) > SAME * abs(b) for a, b in pairs)


def compared(arguments: argparse.Namespace) -> tuple[Table, list[Result], list[str]]:
    """The table of both sides, all results, and what missed its bound."""
    table: Table = [("", "", "", "s/step", "ratio", "peak MiB", "ratio", "before", "elements", "loss")]
    results: list[Result] = []
    missed: list[str] = []
    for algorithm in ALGORITHMS:
        for dtype in ("float32", "bfloat16"):
            sides = compare(algorithm, dtype, arguments.speculators_venv, arguments.rounds)
            results += [{"side": name, **result} for name, result in sides.items()]
            for name, result in sides.items():
                base = sides[LIKE.get(name, "speculators, head trained" if "trained" in name else "speculators")]
                table.append((algorithm, dtype, name, *compared_cells(result, base, is_bound=name in LIKE)))
            for name, theirs_name in LIKE.items():
                our, base = sides[name], sides[theirs_name]
                for key, bound in (("seconds", TIME_BOUND), ("peak", MEMORY_BOUND)):
                    if our[key] > bound * base[key]:
                        what = f"{algorithm} {dtype} {name}: {key}"
                        missed.append(f"{what} {our[key] / base[key]:.2f}, wanted <= {bound}")
                if differs(our, base):
                    missed.append(f"{algorithm} {dtype} {name}: the two sides did not do the same work")
    return table, results, missed


def compared_cells(result: Result, base: Result, *, is_bound: bool) -> tuple[str, ...]:
    """The cells of one side: time, memory, memory before the first step, work."""
    bounds = (f" (<= {TIME_BOUND})", f" (<= {MEMORY_BOUND})") if is_bound else ("", "")
    return (
        f"{result['seconds']:.3f}",
        f"{result['seconds'] / base['seconds']:.2f}{bounds[0]}",
        f"{result['peak']:.0f}",
        f"{result['peak'] / base['peak']:.2f}{bounds[1]}",
        f"{result['built']:.0f}",
        "+".join(map(str, result["elements"])),
        f"{result['loss']:.4f}",
    )


def grown(arguments: argparse.Namespace) -> tuple[Table, list[Result], list[str]]:
    """Our step as rows grow: one document, and documents of 512 tokens, where attention is linear too."""
    head = ("", "documents", "tokens", "s/step", "ms/token", "of 512's", "peak MiB", "MiB over 512's / 1k tokens")
    table: Table = [head]
    results: list[Result] = []
    missed: list[str] = []
    for algorithm, depths in GROWTH:
        for is_packed in (False, True):
            base: Result | None = None
            for tokens in TOKENS:
                # Short steps are noisier and cheaper, so more of them are taken.
                steps = max(2, 4096 // tokens)
                run = Run(algorithm, "float32", "own", depths, tokens, PIECE if is_packed else tokens, 1, steps)
                result = fastest([ours(run) for _ in range(arguments.rounds)])
                base = base or result
                results.append({"side": "specctl", **result})
                ratio = per_token(result) / per_token(base)
                table.append(grown_cells(result, base, is_packed=is_packed))
                if is_packed and ratio > GROWTH_BOUND:
                    missed.append(f"{algorithm} K {depths}, {tokens} tokens: {ratio:.2f}, wanted <= {GROWTH_BOUND}")
    return table, results, missed


def per_token(result: Result) -> float:
    """Milliseconds of forward and backward for each token; the update costs the same for any row."""
    return float(1000 * result["passes"] / result["tokens"])


def grown_cells(result: Result, base: Result, *, is_packed: bool) -> tuple[str, ...]:
    """The cells of one length."""
    more = result["tokens"] - base["tokens"]
    growth = f"{(result['peak'] - base['peak']) / more * 1000:.1f}" if more else ""
    bound = f" (<= {GROWTH_BOUND})" if is_packed else ""
    return (
        f"{result['algorithm']} K {result['depths']}",
        f"of {PIECE}" if is_packed else "one",
        f"{result['tokens']:,}",
        f"{result['seconds']:.2f}",
        f"{per_token(result):.3f}",
        f"{per_token(result) / per_token(base):.2f}{bound}",
        f"{result['peak']:.0f}",
        growth,
    )


def report(table: Table, missed: Sequence[str]) -> None:
    """The table, the machine, and what was missed."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(f"\n1 thread for each process, {os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}")
    for line in missed:
        print(f"missed: {line}")


def main() -> int:
    """Measure, print, save; 0 where all bounds hold and 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speculators-venv", type=Path, default=ROOT / ".cache/speculators-venv", metavar="DIR")
    parser.add_argument("--growth", action="store_true", help="our step at 512 to 8,192 tokens, instead of both sides")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save all results")
    parser.add_argument("--head", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ours", metavar="RUN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.ours:
        run = Run(**json.loads(arguments.ours))
        model, step = our_step(run, arguments.head)
        print(json.dumps(shared.measured(run, step, our_update(model))))
        return 0
    table, results, missed = grown(arguments) if arguments.growth else compared(arguments)
    report(table, missed)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""How fast `specctl extract` is, as ratios within one run, against what a user would otherwise do.

    make bench        (SmolLM2, real chats, both dtypes; about 12 minutes on two cores)

(a) end to end with shards on disk, against the bare forward of the base model in the best batching found;
(b) against a padded batch with `output_hidden_states=True` and one `torch.save` per sample;
(c) reading slots back, against numpy reading the same bytes; the size of the Parquet shards;
(d) peak memory above the loaded model for 1x and 8x the data.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from specctl.core import chat  # noqa: E402
from specctl.core.device import DTYPES  # noqa: E402
from specctl.core.target import LoadedTarget, describe_target, load_target, load_tokenizer  # noqa: E402
from specctl.plugins import load_store  # noqa: E402
from specctl.recipes.extract import extract  # noqa: E402
from specctl.records.extraction import ExtractConfig  # noqa: E402
from specctl.records.progress import SilentReporter  # noqa: E402

CPU = torch.device("cpu")
SLOTS = ("2", "15", "27", "norm")


def read_rows(paths: list[str], limit: int) -> list[dict[str, Any]]:
    """Chats of mixed length: worked answers of GSM8K and whatever `paths` hold, alternating."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        rows += [json.loads(line) for line in Path(path).read_text().splitlines()]
    gsm8k = (ROOT / "specctl/prompts/gsm8k/test.jsonl").read_text().splitlines()
    for line in gsm8k[: max(0, limit - len(rows))]:
        row = json.loads(line)
        turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        rows.append({"messages": turns})
    return rows[:limit]


def timed(work: Callable[[], Any]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and the attention mask that people pass with them."""
    width = max(len(s.input_ids) for s in samples)
    ids, mask = torch.zeros(2, len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.input_ids)] = torch.from_numpy(sample.input_ids)
        mask[row, : len(sample.input_ids)] = 1
    return ids, mask


@torch.inference_mode()
def bare_forward(target: LoadedTarget, batches: list[list[Any]], *, mask: bool) -> None:
    """The base model over every batch, nothing kept."""
    for batch in batches:
        ids, attention = padded(batch)
        options = {"attention_mask": attention} if mask and not bool(attention.all()) else {}
        target.decoder.caller(input_ids=ids, use_cache=False, **options)


def batchings(samples: list[Any]) -> dict[str, tuple[list[list[Any]], bool]]:
    """The batchings that a careful user would try, each with the mask it needs."""
    ordered = sorted(samples, key=lambda s: len(s.input_ids))
    found = {"one by one": ([[s] for s in ordered], False)}
    for tokens in (1024, 2048, 4096):
        batches: list[list[Any]] = []
        for sample in ordered:
            width = len(sample.input_ids)
            if batches and (len(batches[-1]) + 1) * width <= tokens:
                batches[-1].append(sample)
            else:
                batches.append([sample])
        found[f"sorted, {tokens} tokens, masked"] = (batches, True)
        found[f"sorted, {tokens} tokens, no mask"] = (batches, False)
    plan: list[list[Any]] = []
    for sample in reversed(ordered):
        width = len(plan[-1][0].input_ids) if plan else 0
        fits = bool(plan) and (len(plan[-1]) + 1) * width <= 2048 and len(sample.input_ids) >= width * 7 // 8
        if fits:
            plan[-1].append(sample)
        else:
            plan.append([sample])
    found["specctl's own plan, no mask"] = (plan, False)
    return found


@torch.inference_mode()
def as_people_do(target: LoadedTarget, samples: list[Any], folder: Path, batch: int = 8) -> None:
    """Padded batches in file order, every layer's states through the LM, one pickle per sample."""
    for start in range(0, len(samples), batch):
        group = samples[start : start + batch]
        ids, mask = padded(group)
        output = target.model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        for row, sample in enumerate(group):
            length = len(sample.input_ids)
            states = {slot: output.hidden_states[-1 if slot == "norm" else int(slot)][row, :length] for slot in SLOTS}
            record = {"input_ids": ids[row, :length].clone(), **{k: v.clone() for k, v in states.items()}}
            torch.save(record, folder / f"{sample.sample_id}.pt")


def end_to_end(target: str, data: Path, out: Path, dtype: str, format: str) -> float:
    """Seconds of one whole run in this process: read, tokenise, load, extract, seal."""
    config = ExtractConfig(target, (str(data),), str(out), dtype=dtype, format=format, overwrite=True)
    return timed(lambda: extract(config, SilentReporter()))


def reading(folder: Path, repeats: int = 5) -> tuple[float, float, float]:
    """Bytes per second through specctl and through `numpy.fromfile` of the same bytes, and their ratio.

    Pairs of readings, alternating, the best of each: both read from the page cache.
    """
    files = sorted((folder / "shards").glob("*.safetensors"))
    store = load_store("safetensors")

    def through_specctl() -> int:
        return sum(int(np.array(shard.slot(s)).nbytes) for shard in map(store.open_shard, files) for s in SLOTS)

    def through_numpy() -> int:
        return sum(np.fromfile(path, np.uint16).nbytes for path in files)

    size = through_specctl()
    through_numpy()
    ours = size / min(timed(through_specctl) for _ in range(repeats))
    plain = size / min(timed(through_numpy) for _ in range(repeats))
    return ours, plain, ours / plain


MEMORY_PROBE = """
import sys
sys.path.insert(0, {root!r})
import specctl.core.extraction as extraction
from specctl.cli.app import run

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

loaded = []
load = extraction.load_target
def load_and_note(*arguments, **options):
    target = load(*arguments, **options)
    sum(float(p.sum()) for p in target.model.parameters())  # weights are mapped: touch them all
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew here
    loaded.append(status("VmRSS"))
    return target
extraction.load_target = load_and_note
config = {out!r} + ".toml"
open(config, "w").write("shard_mib = {mib}")
code = run(["extract", {target!r}, {data!r}, "--out", {out!r}, "--config", config, "--device", "cpu", "--quiet"])
assert code == 0
print(status("VmHWM") - loaded[0])
"""


def peak_memory(target: str, data: Path, shard_mib: int) -> int:
    """Bytes of peak resident memory above the loaded model, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        fields = {"root": str(ROOT), "target": target, "data": str(data), "out": f"{out}/o"}
        code = MEMORY_PROBE.format(**fields, mib=shard_mib)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return int(done.stdout.split()[-1])


def measure(target_name: str, data: Path, dtype: str) -> list[tuple[str, str, str, str]]:
    """The rows of the table for one dtype."""
    spec = describe_target(target_name)
    target = load_target(spec, dtype=dtype, device=CPU)
    tokenizer = load_tokenizer(spec)
    template = chat.effective_template(tokenizer, None)
    samples: list[Any] = [
        s for s in chat.samples([str(data)], tokenizer, template=template, max_length=2048) if hasattr(s, "input_ids")
    ]
    tokens = sum(len(s.input_ids) for s in samples)
    few = samples[:: max(1, len(samples) // 20)]
    few_tokens = sum(len(s.input_ids) for s in few)
    bare_forward(target, [few[:4]], mask=False)
    speeds = {
        name: few_tokens / timed(lambda b=batches, m=mask: bare_forward(target, b, mask=m))
        for name, (batches, mask) in batchings(few).items()
    }
    best = max(speeds, key=lambda name: speeds[name])
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Interleaved, so that a machine that slows down slows all of them.
        batches, mask = batchings(samples)[best]
        seconds: dict[str, list[float]] = {"bare": [], "specctl": [], "people": []}
        for _ in range(3):
            seconds["bare"].append(timed(lambda: bare_forward(target, batches, mask=mask)))
            seconds["specctl"].append(end_to_end(target_name, data, folder / "ours", dtype, "safetensors"))
            (folder / "theirs").mkdir(exist_ok=True)
            seconds["people"].append(timed(lambda: as_people_do(target, samples, folder / "theirs")))
        fastest = {key: min(values) for key, values in seconds.items()}
        rate = {key: tokens / value for key, value in fastest.items()}
        rows.append((dtype, f"bare forward, {best}", f"{rate['bare']:,.0f} tokens/s", "1.00"))
        ratio = f"{rate['specctl'] / rate['bare']:.2f} (>= 0.90)"
        rows.append((dtype, "(a) specctl extract, shards on disk", f"{rate['specctl']:,.0f} tokens/s", ratio))
        ratio = f"{rate['specctl'] / rate['people']:.2f} (>= 1.5)"
        rows.append((dtype, "(b) against padded batch + torch.save", f"{rate['people']:,.0f} tokens/s", ratio))
        ours, plain, part = reading(folder / "ours")
        rows.append((dtype, "(c) slots read through specctl", f"{ours / 1e9:.2f} GB/s", f"{part:.2f} (>= 0.8)"))
        rows.append((dtype, "    numpy.fromfile, same bytes", f"{plain / 1e9:.2f} GB/s", "1.00"))
        end_to_end(target_name, data, folder / "parquet", dtype, "parquet")
        size = sum(p.stat().st_size for p in (folder / "parquet/shards").iterdir())
        raw = tokens * spec.hidden_size * len(SLOTS) * DTYPES[dtype].itemsize
        limit = "(<= 0.72)" if dtype == "bfloat16" else ""
        rows.append((dtype, "(c) Parquet size of raw", f"{size / 1e6:.1f} MB", f"{size / raw:.3f} {limit}".strip()))
    return rows


def memory_rows(target: str, data: Path, folder: Path, shard_mib: int = 16) -> list[tuple[str, str, str, str]]:
    """Peak memory above the loaded model for one sample, for the data, and for eight times the data."""
    lines = data.read_text().splitlines()
    peaks = {}
    for name, part, times in (("one sample", lines[:1], 1), ("1x data", lines, 1), ("8x data", lines, 8)):
        path = folder / "many.jsonl"
        copies = [json.dumps({**json.loads(x), "id": f"{t}-{i}"}) for t in range(times) for i, x in enumerate(part)]
        path.write_text("\n".join(copies) + "\n")
        peaks[name] = peak_memory(target, path, shard_mib)
    rows = [("bfloat16", f"(d) peak above the model, {k}", f"{v / 2**20:.0f} MiB", "") for k, v in peaks.items()]
    limit = f"(2 shards are {2 * shard_mib} MiB)"
    return [*rows[:1], *((*row[:3], limit) for row in rows[1:])]


def main() -> int:
    """Print the table, as Markdown with --markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--chats", nargs="*", default=[])
    parser.add_argument("--limit", type=int, default=80)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float32"])
    parser.add_argument("--no-memory", action="store_true")
    arguments = parser.parse_args()
    rows: list[tuple[str, str, str, str]] = []
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "chats.jsonl"
        data.write_text("".join(json.dumps(r) + "\n" for r in read_rows(arguments.chats, arguments.limit)))
        for dtype in arguments.dtypes:
            rows += measure(arguments.target, data, dtype)
        if not arguments.no_memory:
            few = Path(name) / "few.jsonl"
            few.write_text("".join(data.read_text().splitlines(keepends=True)[:24]))
            rows += memory_rows(arguments.target, few, Path(name))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print(
        f"\n{torch.get_num_threads()} threads, torch {torch.__version__}, peak of this process "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
    )
    return 0


if __name__ == "__main__":
    shutil.get_terminal_size()
    sys.exit(main())

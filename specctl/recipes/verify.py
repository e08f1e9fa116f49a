"""Proves a shard folder: sizes, checksums, structure, finite values, and with a target its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import plugins
from specctl.errors import InputError, ShardError
from specctl.records.progress import Reporter
from specctl.records.shard import SHARDS, Manifest, ShardEntry

if TYPE_CHECKING:
    from specctl.core.recompute import SlotMatch

SAMPLES = 4
MAX_LOGIT_GAP: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.02}
"""Mean log-probability difference. On the machine that made the folder it is 0; other kernels round
other ways (4e-6 in float32), and one wrong layer gives more than 0.1."""


@dataclass(frozen=True, slots=True)
class VerifyConfig:
    """A folder to prove, and optionally the target that it came from."""

    folder: str
    target: str | None = None
    samples: int = SAMPLES
    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`faults` empty means proven. `recomputed` per slot and `logits` only with a target."""

    folder: str
    shards: int
    samples: int
    tokens: int
    bytes: int
    faults: tuple[str, ...]
    recomputed: tuple[SlotMatch, ...]
    logits: Mapping[str, float]
    recomputed_samples: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.faults


def verify(config: VerifyConfig, reporter: Reporter) -> VerifyReport:
    """Check every shard, then recompute samples when a target is named.

    Raises ShardError when the folder is none, InputError when the target is another one.
    """
    from specctl.core.folder import read_manifest

    folder = Path(config.folder)
    manifest = read_manifest(folder)
    faults = list(_folder_faults(folder, manifest))
    reporter.start("verifying", sum(e.bytes for e in manifest.shards), "bytes")
    for entry in manifest.shards:
        faults += shard_faults(folder, entry, manifest)
        reporter.advance(entry.bytes)
    reporter.stop()
    matches: tuple[SlotMatch, ...] = ()
    gaps: Mapping[str, float] = {}
    count = 0
    if config.target is not None and not faults:
        matches, gaps, count = _recompute(config, config.target, manifest, reporter)
        faults += _recompute_faults(matches, gaps, manifest.settings["dtype"])
    return VerifyReport(
        folder=config.folder,
        shards=len(manifest.shards),
        samples=sum(e.rows for e in manifest.shards),
        tokens=sum(e.tokens for e in manifest.shards),
        bytes=sum(e.bytes for e in manifest.shards),
        faults=tuple(faults),
        recomputed=matches,
        logits=gaps,
        recomputed_samples=count,
    )


def shard_faults(folder: Path, entry: ShardEntry, manifest: Manifest) -> Iterator[str]:
    """One line per fault of a shard: size, checksum, structure, layout, non-finite values."""
    from specctl.core.folder import sha256
    from specctl.core.shardfile import non_finite

    if not entry.rows:
        return
    path = folder / SHARDS / entry.file
    try:
        shard = plugins.load_store(manifest.settings["format"]).open_shard(path, entry)
        if sha256(path) != entry.checksum:
            yield f"{entry.file}: the checksum differs from the manifest's, the content has changed"
            return
        offsets, mask = shard.offsets(), shard.loss_mask()
        counts = (len(shard.sample_ids), int(offsets[-1]), int(mask.sum()))
        listed = (entry.rows, entry.tokens, entry.supervised_tokens)
        if counts != listed or shard.layout.slots != manifest.slots:
            yield f"{entry.file}: holds {counts} rows, tokens and supervised tokens; the manifest lists {listed}"
            return
        for slot in manifest.slots:
            bad = non_finite(shard.slot(slot), offsets[1:] - offsets[:-1], manifest.settings["dtype"])
            for i in bad.nonzero()[0].tolist():
                yield f"{entry.file}: sample `{shard.sample_ids[i]}`, slot {slot}: {bad[i]} values are NaN or infinite"
    except ShardError as error:
        yield f"{entry.file}: {error.message}"


def _folder_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    if not manifest.is_complete:
        yield "the run that made this folder did not finish; run its `specctl extract` again"
    listed = {entry.file for entry in manifest.shards}
    for path in sorted((folder / SHARDS).glob("[!.]*")):
        if path.name not in listed:
            yield f"{path.name}: not listed in the manifest"


def _recompute(
    config: VerifyConfig, name: str, manifest: Manifest, reporter: Reporter
) -> tuple[tuple[SlotMatch, ...], Mapping[str, float], int]:
    import torch as _torch  # noqa: F401  (loaded here so that a check without a target stays light)

    from specctl.core.device import pick_device
    from specctl.core.extraction import pad_right
    from specctl.core.recompute import logit_gaps, match, reference_states, to_torch, worse
    from specctl.core.target import describe_target, load_target

    spec = describe_target(name, trust_remote_code=config.trust_remote_code)
    if spec.weights_fingerprint != manifest.settings["target_weights"]:
        raise InputError(
            "the weights are not those that the states were made with",
            where=spec.path,
            hint=f"the folder was made from `{manifest.provenance.get('target')}`",
        )
    dtype = str(manifest.settings["dtype"])
    target = load_target(
        spec, dtype=dtype, device=pick_device(config.device), trust_remote_code=config.trust_remote_code
    )
    worst: dict[str, SlotMatch] = {}
    gaps: dict[str, float] = {}
    samples = list(_spread(Path(config.folder), manifest, config.samples, target.spec.path))
    reporter.start("recomputing", len(samples), "samples")
    for rows, row, stored in samples:
        states = {slot: to_torch(array, dtype) for slot, array in stored.items()}
        expected = reference_states(target, pad_right(rows), row, len(rows[row]), manifest.slots)
        for slot in expected.keys() & states.keys():
            worst[slot] = worse(worst.get(slot), match(slot, states[slot], expected[slot]))
        tokens = to_torch(rows[row], "int32").long()
        for key, gap in (logit_gaps(target, tokens, expected["norm"], states) if expected else {}).items():
            gaps[key] = max(gap, gaps.get(key, 0.0))
        reporter.advance(1)
    reporter.stop()
    return tuple(worst[s] for s in manifest.slots if s in worst), gaps, len(samples)


def _spread(
    folder: Path, manifest: Manifest, count: int, target: str
) -> Iterator[tuple[list[Any], int, dict[str, Any]]]:
    """`count` samples spread over the shards: the ids of the batch each was in, its row there, its states."""
    from specctl.core.lengths import length_rule
    from specctl.core.plan import cut_batches

    store, rule = plugins.load_store(manifest.settings["format"]), length_rule(target)
    entries = [e for e in manifest.shards if e.rows]
    total = sum(e.rows for e in entries)
    wanted = sorted({total * i // count for i in range(count)})
    before = 0
    for entry in entries:
        mine = [w - before for w in wanted if before <= w < before + entry.rows]
        before += entry.rows
        if not mine:
            continue
        shard = store.open_shard(folder / SHARDS / entry.file, entry)
        offsets, ids = shard.offsets(), shard.input_ids()
        samples = [ids[int(a) : int(b)] for a, b in pairwise(offsets)]
        columns = {slot: shard.slot(slot) for slot in manifest.slots}
        size = int(manifest.provenance["batch_tokens"])
        batches = cut_batches([len(s) for s in samples], batch_tokens=size, rule=rule)
        for i in mine:
            first, end = next((a, b) for a, b in batches if a <= i < b)
            rows = slice(int(offsets[i]), int(offsets[i + 1]))
            yield samples[first:end], i - first, {slot: column[rows] for slot, column in columns.items()}


def _recompute_faults(matches: tuple[SlotMatch, ...], gaps: Mapping[str, float], dtype: str) -> Iterator[str]:
    for found in matches:
        if not found.is_near(dtype):
            yield f"slot {found.slot} is not what the target gives: {found.text()}"
    for name, gap in gaps.items():
        if not gap < MAX_LOGIT_GAP[dtype]:
            limit = MAX_LOGIT_GAP[dtype]
            yield f"logits rebuilt from {name} differ by {gap:.3g} in mean log-probability, {limit:g} is allowed"

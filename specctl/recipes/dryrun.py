"""What `extract` would make and how long it would take, with the speed measured. Writes nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.errors import NotSupportedError, SettingsChangedError
from specctl.recipes.extract import Setup, read_data, remaining, set_up
from specctl.records.extraction import ExtractConfig
from specctl.records.progress import Reporter
from specctl.records.shard import MANIFEST, Manifest, differing_settings

if TYPE_CHECKING:
    from specctl.core.plan import PlannedShard
    from specctl.core.samples import Spool

MEASURE_S = 8.0


@dataclass(frozen=True, slots=True)
class DryRunReport:
    """What a run would make. `bytes_per_slot` is before compression."""

    target: str
    slots: tuple[str, ...]
    dtype: str
    format: str
    rows: int
    samples: int
    tokens: int
    supervised_tokens: int
    truncated: int
    drops: Mapping[str, int]
    shards: int
    bytes_per_slot: int
    bytes: int
    free_bytes: int
    tokens_per_s: float
    seconds: float


def plan_only(config: ExtractConfig, reporter: Reporter) -> DryRunReport:
    """What `extract` would do, with the speed measured on a few real batches. Writes nothing to `out`."""
    from specctl.core import placement
    from specctl.core.resume import bytes_per_token
    from specctl.core.samples import open_spool

    placement.check_sizes(config.pp, config.tp)
    if config.engine != "reference":
        raise NotSupportedError(
            f"`--dry-run` measures specctl's own engine, and `--engine {config.engine}` is another",
            hint="leave out `--engine`; samples, bytes and shards are the same for any engine",
        )
    if config.pp * config.tp > 1:
        raise NotSupportedError(
            "`--dry-run` measures the speed of one process",
            hint="leave out `--pp` and `--tp`; samples, bytes and shards are the same for any number of ranks",
        )
    setup = set_up(config, reporter, 1)
    with tempfile.TemporaryDirectory(prefix="specctl-") as temporary:
        read = read_data(config, setup, Path(temporary), reporter)
        spool = open_spool(Path(temporary))
        shards, _done, _kept = remaining(config, setup, spool, _existing(config, setup))
        speed = _measured(config, setup, spool, shards) if shards else 0.0
    tokens = sum(shard.num_tokens for shard in shards)
    per_slot = tokens * bytes_per_token(setup.settings) // len(setup.settings["slots"])
    return DryRunReport(
        target=config.target,
        slots=tuple(setup.settings["slots"]),
        dtype=str(setup.settings["dtype"]),
        format=config.format,
        rows=read.rows,
        samples=sum(len(shard.samples) for shard in shards),
        tokens=tokens,
        supervised_tokens=int(sum(spool.supervised[list(shard.samples)].sum() for shard in shards)),
        truncated=read.truncated,
        drops=read.drops,
        shards=len(shards),
        bytes_per_slot=per_slot,
        bytes=per_slot * len(setup.settings["slots"]),
        free_bytes=shutil.disk_usage(_existing_parent(Path(config.out))).free,
        tokens_per_s=round(speed, 1),
        seconds=round(tokens / speed, 3) if speed else 0.0,
    )


def _existing(config: ExtractConfig, setup: Setup) -> Manifest:
    """The manifest that a run would continue, or an empty one. Reads only."""
    from specctl.core import folder as folders

    empty = Manifest(settings=setup.settings, provenance={})
    out = Path(config.out)
    if config.overwrite or not (out / MANIFEST).exists():
        return empty
    manifest = folders.read_manifest(out)
    if not manifest.shards:
        return empty
    differing = differing_settings(manifest.settings, setup.settings)
    if differing:
        raise SettingsChangedError(f"the folder was made with other settings: {'; '.join(differing)}", where=str(out))
    return manifest


def _measured(config: ExtractConfig, setup: Setup, spool: Spool, shards: Sequence[PlannedShard]) -> float:
    from specctl.core.device import pick_device
    from specctl.core.extraction import measure_speed
    from specctl.core.lengths import length_rule
    from specctl.core.plan import plan_batches
    from specctl.core.target import load_target

    target = load_target(
        setup.spec,
        dtype=str(setup.settings["dtype"]),
        device=pick_device(config.device),
        trust_remote_code=config.trust_remote_code,
    )
    rule = length_rule(setup.spec.path)
    batches = plan_batches(spool, shards[0], batch_tokens=setup.batch_tokens, rule=rule)
    spread = batches[:: max(1, len(batches) // 8)]  # long and short samples alike
    return measure_speed(target, spool, spread, setup.settings["slots"], MEASURE_S)


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.absolute().parent
    return path

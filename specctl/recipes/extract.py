"""The road from DATA to a shard folder: read, tokenise, plan, run, seal. Knows no torch.

`extract` is one run or its continuation; `recipes/dryrun.py` says what it would do, `recipes/verify.py`
proves a folder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl import plugins
from specctl.errors import SpecctlError, UsageError
from specctl.recipes.reading import cut_length, say_what_else_is_there
from specctl.recipes.reading import read_data as read_data
from specctl.recipes.served import ready, refuse_server_options, run_served
from specctl.records.extraction import ExtractConfig, ExtractReport, role_map
from specctl.records.layers import parse_slots
from specctl.records.progress import Reporter
from specctl.records.provenance import versions
from specctl.records.shard import Manifest, final_norm_applied
from specctl.records.target import TargetSpec

if TYPE_CHECKING:
    from specctl.core.extraction import ExtractJob
    from specctl.core.plan import PlannedShard
    from specctl.core.positions import Positions
    from specctl.core.resume import Remaining
    from specctl.core.samples import Spool

CPU_BATCH_TOKENS = 2048
GPU_BATCH_TOKENS = 16384
MASK_POLICY = "assistant turns with their end-of-turn token"


@dataclass(frozen=True, slots=True)
class Setup:
    """What the command line and the target's files decide before DATA is read.

    Samples are cut to `max_length`; `positions` are the target's where `--max-length` is more than them.
    """

    spec: TargetSpec
    tokenizer: Any
    template: str | None
    settings: Mapping[str, Any]
    batch_tokens: int
    max_length: int
    positions: Positions | None


def extract(config: ExtractConfig, reporter: Reporter) -> ExtractReport | None:
    """Make or continue the shard folder; None on a torchrun rank that has nothing to report.

    Raises SpecctlError for whatever the user or the machine can cause; the folder stays whole.
    """
    from specctl.core import parallel, placement

    refuse_server_options(config, ExtractConfig("", ("",), ""))
    if config.engine != "reference":
        if parallel.is_torchrun():
            raise UsageError(f"`--engine {config.engine}` starts its server itself, and torchrun started this process")
        return _lead(config, reporter, None)
    placement.check_sizes(config.pp, config.tp)
    world = parallel.torchrun_world(config.pp, config.tp)
    if world is not None and world.rank != 0:
        job = world.receive("job")
        if isinstance(job, SpecctlError):
            raise job
        if job is not None:
            parallel.run_in_world(world, job, pp=config.pp, tp=config.tp, device=config.device, reporter=reporter)
        return None
    try:
        return _lead(config, reporter, world)
    except SpecctlError as error:
        if world is not None:
            world.share("job", error)
        raise


def _lead(config: ExtractConfig, reporter: Reporter, world: Any) -> ExtractReport:
    from specctl.core import folder as folders
    from specctl.core import parallel
    from specctl.core.counts import seal
    from specctl.core.samples import open_spool

    began = time.monotonic()
    setup = set_up(config, reporter, config.pp * config.tp if world is None else 1)
    out = Path(config.out)
    with folders.held(out, overwrite=config.overwrite, reporter=reporter):
        manifest = folders.begin(out, Manifest(settings=setup.settings, provenance=_provenance(config, setup)))
        try:
            read = read_data(config, setup, out / folders.PREPARED, reporter)
            left = _remaining(config, setup, open_spool(out / folders.PREPARED), manifest)
            job = _job(config, setup, out / folders.PREPARED, left, reporter)
            new_tokens = sum(s.num_tokens for s in job.shards)
            if job.shards:
                _run(job, config, world, reporter)
            elif world is not None:
                world.share("job", None)
            seal(out, read)
        except KeyboardInterrupt:
            raise parallel.interrupted(len(folders.read_manifest(out).shards)) from None
        finally:
            folders.remove_temporaries(out)
    say_what_else_is_there(config, out, left, reporter)
    return _report(config, left, new_tokens, time.monotonic() - began, reporter)


def set_up(config: ExtractConfig, reporter: Reporter, num_local_ranks: int) -> Setup:
    """Everything that can be refused before DATA is read or weights load."""
    from specctl.core import chat, split
    from specctl.core.device import check_device
    from specctl.core.folder import unsaid
    from specctl.core.positions import read_positions
    from specctl.core.target import describe_target, load_tokenizer

    packing = compression(config)
    spec = describe_target(config.target, revision=config.revision, trust_remote_code=config.trust_remote_code)
    slots = parse_slots(config.layers, spec.num_layers)
    positions = read_positions(spec, config.max_length, trust_remote_code=config.trust_remote_code)
    longest = cut_length(config, positions)
    on_gpu, engine = False, {}
    if config.engine == "reference":
        note = split.check_split(spec, pp=config.pp, tp=config.tp, trust_remote_code=config.trust_remote_code)
        if note:
            reporter.note(note)
        on_gpu = check_device(config.device, num_local_ranks)
    else:
        engine = ready(replace(config, max_length=longest), spec, slots, reporter)
    tokenizer = load_tokenizer(spec, trust_remote_code=config.trust_remote_code)
    template = chat.effective_template(tokenizer, config.chat_template)
    dtype = spec.compute_dtype if config.dtype == "auto" else config.dtype
    settings = {
        "target_config": spec.config_hash,
        "target_weights": spec.weights_fingerprint,
        "architecture": spec.architecture,
        "quantization": spec.quantization,
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "tokenizer": chat.tokenizer_hash(tokenizer),
        "chat_template": chat.template_hash(template),
        "mask_policy": MASK_POLICY,
        # As it was asked for: with the target it says where samples are cut.
        "max_length": config.max_length,
        "role_map": dict(sorted(role_map(config.role_map).items())),
        "dtype": dtype,
        "slots": list(slots),
        "final_norm_applied": final_norm_applied(slots),
        "format": config.format,
        "compression": packing,
        **engine,
    }
    default = GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS
    # A folder of an older specctl does not say every setting: what it leaves out is taken as given.
    for name in () if config.overwrite else unsaid(Path(config.out), ("role_map",)):
        settings.pop(name)
    return Setup(spec, tokenizer, template, settings, config.batch_tokens or default, longest, positions)


def compression(config: ExtractConfig) -> str:
    """The compression asked for, or the container's own. Raises UsageError for one it does not have."""
    allowed = plugins.load_store(config.format).COMPRESSIONS
    if config.compression is not None and config.compression not in allowed:
        raise UsageError(
            f"`--compression {config.compression}` with `--format {config.format}`: it takes {' or '.join(allowed)}",
            hint="`--format parquet` compresses" if "zstd" not in allowed else None,
        )
    return config.compression or allowed[0]


def _job(config: ExtractConfig, setup: Setup, prepared: Path, left: Remaining, reporter: Reporter) -> ExtractJob:
    """The shards still to make."""
    from specctl.core.extraction import ExtractJob

    _require_space(config, setup, sum(s.num_tokens for s in left.shards))
    if left.kept:
        what = "nothing is left to do" if not left.shards else f"{len(left.shards)} to go"
        reporter.note(f"shards already there: {left.kept}; {what}")
    return ExtractJob(
        spec=setup.spec,
        folder=Path(config.out),
        spool=prepared,
        shards=tuple(left.shards),
        slots=tuple(setup.settings["slots"]),
        dtype=str(setup.settings["dtype"]),
        device=config.device,
        format=config.format,
        compression=str(setup.settings["compression"]),
        batch_tokens=setup.batch_tokens,
        allow_overflow=config.allow_overflow,
        trust_remote_code=config.trust_remote_code,
        tokens_before=left.done_tokens,
    )


def remaining(
    config: ExtractConfig, setup: Setup, spool: Spool, manifest: Manifest
) -> tuple[list[PlannedShard], int, int]:
    """Shards to make, tokens already made, shards kept."""
    left = _remaining(config, setup, spool, manifest)
    return left.shards, left.done_tokens, left.kept


def _remaining(config: ExtractConfig, setup: Setup, spool: Spool, manifest: Manifest) -> Remaining:
    from specctl.core.resume import bytes_per_token, remaining_shards

    per_shard = config.shard_mib * 2**20 // bytes_per_token(setup.settings)
    return remaining_shards(
        spool,
        manifest,
        folder=Path(config.out),
        shard_tokens=max(per_shard, setup.batch_tokens),
        seed=config.seed,
        limit=config.limit,
    )


def _require_space(config: ExtractConfig, setup: Setup, tokens: int) -> None:
    from specctl.core.resume import bytes_per_token
    from specctl.core.shardfile import require_space

    needed = tokens * bytes_per_token(setup.settings)
    if setup.settings["compression"] == "zstd":
        needed = needed * 6 // 10  # what compresses best in practice; the writer finds out the rest
    require_space(Path(config.out), needed, shutil.disk_usage(config.out).free)


def _run(job: ExtractJob, config: ExtractConfig, world: Any, reporter: Reporter) -> None:
    from specctl.core import launch, parallel

    if config.engine != "reference":
        run_served(job, config, reporter)
        return
    if world is None:
        launch.run_local(job, pp=config.pp, tp=config.tp, device=config.device, reporter=reporter)
        return
    world.share("job", job)
    parallel.run_in_world(world, job, pp=config.pp, tp=config.tp, device=config.device, reporter=reporter)


def _report(
    config: ExtractConfig, left: Remaining, new_tokens: int, seconds: float, reporter: Reporter
) -> ExtractReport:
    from specctl.core import folder as folders

    manifest = folders.read_manifest(Path(config.out))
    for drop in manifest.dropped_samples[:3]:
        reporter.warn(f"dropped sample `{drop.sample_id}`: {drop.reason}")
    counts = manifest.counts
    return ExtractReport(
        out=config.out,
        target=config.target,
        slots=manifest.slots,
        dtype=manifest.settings["dtype"],
        format=config.format,
        rows=counts["rows"],
        samples=counts["samples"],
        tokens=counts["tokens"],
        supervised_tokens=counts["supervised_tokens"],
        truncated=counts["truncated"],
        asked=left.asked,
        stale=left.stale,
        drops=manifest.drops,
        shards=len(manifest.shards),
        bytes=sum(entry.bytes for entry in manifest.shards),
        new_tokens=new_tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(new_tokens / seconds, 1),
    )


def _provenance(config: ExtractConfig, setup: Setup) -> dict[str, Any]:
    return {
        "target": setup.spec.name,
        "revision": setup.spec.revision,
        "batch_tokens": setup.batch_tokens,
        "data": list(config.data),
        "seed": config.seed,
        "limit": config.limit,
        "versions": versions(),
    }

"""Shards whose states another engine hands out: asked for, put in order, checked, and written as always.

The engine gives boundaries; the slot `norm` is the target's own final norm over the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specctl.core.collect import Collected, Piece, collect
from specctl.core.extraction import ExtractJob, to_numpy
from specctl.core.finalnorm import FinalNorm, read_final_norm
from specctl.core.placement import Placement
from specctl.core.plan import PlannedShard
from specctl.core.recompute import to_torch
from specctl.core.samples import Spool, open_spool
from specctl.core.shardfile import Background, ShardJob
from specctl.core.teaching import read_parts
from specctl.errors import MachineError
from specctl.records.layers import NORM
from specctl.records.progress import Reporter
from specctl.records.sample import Dropped

States = Callable[[Mapping[str, NDArray[np.int32]]], Iterable[Piece]]
"""Request ids with the tokens of each, to the pieces that come back in any order."""


def boundaries(slots: tuple[str, ...], num_layers: int) -> tuple[int, ...]:
    """The boundary ids that an engine has to hand out for `slots`, rising."""
    return tuple(sorted({num_layers if slot == NORM else int(slot) for slot in slots}))


def make_shards(job: ExtractJob, states: States, reporter: Reporter) -> None:
    """Every shard of `job`, from `states`. Raises MachineError for states that are not those of their sample."""
    spool = open_spool(job.spool)
    norm = None
    if NORM in job.slots:
        norm = read_final_norm(read_parts(job.spec.path), trust_remote_code=job.trust_remote_code)
    background = Background(job.writer(spool, Placement()).finish)
    total = sum(shard.num_tokens for shard in job.shards)
    reporter.start("extracting", job.tokens_before + total, "tokens", job.tokens_before)
    try:
        for shard in job.shards:
            background.submit(ShardJob(shard, _shard(job, shard, spool, states=states, norm=norm, reporter=reporter)))
    finally:
        # Also on Ctrl-C: a shard that is being written is finished, not torn.
        background.wait()
        reporter.stop()


def _shard(
    job: ExtractJob,
    shard: PlannedShard,
    spool: Spool,
    *,
    states: States,
    norm: FinalNorm | None,
    reporter: Reporter,
) -> dict[str, Any]:
    """The states [T, D] of a shard, by slot."""
    kind = np.dtype(np.uint16 if job.dtype == "bfloat16" else job.dtype)
    arrays = {slot: np.empty((shard.num_tokens, job.spec.hidden_size), kind) for slot in job.slots}
    asked = {str(sample): spool.input_ids(sample) for sample in shard.samples}
    ends = np.cumsum([len(tokens) for tokens in asked.values()])
    rows = {name: slice(int(end) - len(asked[name]), int(end)) for name, end in zip(asked, ends, strict=True)}
    wanted = tuple(map(str, boundaries(job.slots, job.spec.num_layers)))
    for found in collect(states(asked), asked, wanted):
        if isinstance(found, Dropped):
            name = spool.sample_id(int(found.where))
            raise MachineError(
                f"the engine's states of sample `{name}` are not its own: {found.detail}",
                hint="run the same command again to go on; shards that are complete stay",
            )
        for slot, array in arrays.items():
            array[rows[found.request_id]] = _slot(slot, found, norm=norm, dtype=job.dtype, last=wanted[-1])
        reporter.advance(len(asked[found.request_id]))
    return arrays


def _slot(slot: str, found: Collected, *, norm: FinalNorm | None, dtype: str, last: str) -> Any:
    if slot != NORM:
        return found.states[slot]
    assert norm is not None
    return to_numpy(norm(to_torch(np.asarray(found.states[last]), dtype)))

"""Runs a target over planned shards and records the asked slots. What every rank of `extract` executes.

Batches are padded on the right and no attention mask is passed: a causal model's real tokens never
see what follows them, so the padding is harmless, positions are right, and attention takes its fast
causal path. Rows of padding are never copied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from specctl.core.capture import forward_options, owned_slots, record, require_all
from specctl.core.device import is_gpu, pick_device, release_host_memory, synchronize
from specctl.core.lengths import forget_lengths, length_rule
from specctl.core.parallel import Hop, StageGroup
from specctl.core.placement import Placement, distributed_config
from specctl.core.plan import Batch, PlannedShard, plan_batches
from specctl.core.samples import Spool, open_spool
from specctl.core.shardfile import Background, ShardJob, ShardWriter
from specctl.core.target import LoadedTarget, load_target
from specctl.errors import MachineError, TargetError
from specctl.records.progress import Reporter
from specctl.records.target import TargetSpec

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExtractJob:
    """One run's work, the same on every rank; picklable."""

    spec: TargetSpec
    folder: Path
    spool: Path
    shards: tuple[PlannedShard, ...]
    slots: tuple[str, ...]
    dtype: str
    device: str
    format: str
    compression: str
    batch_tokens: int
    allow_overflow: bool
    trust_remote_code: bool
    tokens_before: int

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        """Make this rank's part of its replica's shards."""
        device = pick_device(self.device, placement.local_rank)
        reporter.note(f"loading {self.spec.architecture} in {self.dtype} on {device}")
        target = load_target(
            self.spec,
            dtype=self.dtype,
            device=device,
            distributed_config=distributed_config(placement),
            trust_remote_code=self.trust_remote_code,
        )
        spool = open_spool(self.spool)
        mine = self.shards[placement.replica :: placement.num_replicas]
        tokens = sum(shard.num_tokens for shard in mine)
        reporter.start("extracting", self.tokens_before + tokens, "tokens", self.tokens_before)
        try:
            self._run(target, spool, mine, placement, reporter)
        finally:
            reporter.stop()

    def writer(self, spool: Spool, placement: Placement) -> ShardWriter:
        """What makes files of this job's shards, on one stage."""
        return ShardWriter(
            folder=self.folder,
            format=self.format,
            compression=self.compression,
            dtype=self.dtype,
            hidden_size=self.spec.hidden_size,
            slots=self.slots,
            allow_overflow=self.allow_overflow,
            spool=spool,
            placement=placement,
            group=StageGroup(placement),
        )

    def _run(
        self,
        target: LoadedTarget,
        spool: Spool,
        shards: Sequence[PlannedShard],
        placement: Placement,
        reporter: Reporter,
    ) -> None:
        background = Background(self.writer(spool, placement).finish)
        stage, rule = Stage(target, self.slots, placement), length_rule(self.spec.path)
        room = max((shard.num_tokens for shard in shards), default=0)
        buffers = [stage.buffers(room) for _ in range(min(2, len(shards)))]
        try:
            with stage.recording():
                for turn, shard in enumerate(shards):
                    states = buffers[turn % 2]
                    batches = plan_batches(spool, shard, batch_tokens=self.batch_tokens, rule=rule)
                    following = shards[turn + 1] if turn + 1 < len(shards) else None
                    after = []
                    if following is not None:
                        after = plan_batches(spool, following, batch_tokens=self.batch_tokens, rule=rule)[:1]
                    for batch, coming in zip_longest(batches, [*batches[1:], *after]):
                        stage.run(spool, batch, states, coming=coming)
                        reporter.advance(batch.end - batch.begin)
                        if not is_gpu(target.device):
                            release_host_memory()
                    synchronize(target.device)
                    if placement.is_recorder:
                        arrays = {s: to_numpy(b[: shard.num_tokens]) for s, b in states.items()}
                        background.submit(ShardJob(shard, arrays))
        finally:
            # Also on Ctrl-C: a shard that is being written is finished, not torn.
            background.wait()
        stage.flush()


class Stage:
    """The layers of one rank and what they record. Batches go through in the order of the plan."""

    def __init__(self, target: LoadedTarget, slots: Sequence[str], placement: Placement) -> None:
        self._target = target
        self._placement = placement
        owned = owned_slots(slots, target.decoder.owned, is_last_stage=placement.is_last_stage)
        self.owned = owned if placement.is_recorder else ()
        self._hop = Hop(placement, target.device, target.dtype)
        self._options = forward_options(target.decoder.caller)
        self._stream: torch.Tensor | None = None
        self._is_first_batch = True
        self._sink = RowSink()

    def buffers(self, num_tokens: int) -> Buffers:
        """Host memory for `num_tokens` rows of each owned slot."""
        shape = (num_tokens, self._target.spec.hidden_size)
        pinned = is_gpu(self._target.device)
        return {slot: torch.empty(shape, dtype=self._target.dtype, pin_memory=pinned) for slot in self.owned}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Attach the recorders and, after the first stage, the hand-over of the received stream."""
        target = self._target
        handle = None
        if not self._placement.is_first_stage:
            handle = target.decoder.layers[0].register_forward_pre_hook(self._hand_over, with_kwargs=True)
        try:
            with record(target.decoder, self.owned, self._sink, model=target.model):
                yield
        finally:
            if handle is not None:
                handle.remove()

    @torch.inference_mode()
    def run(self, spool: Spool, batch: Batch, states: Buffers, *, coming: Batch | None) -> None:
        """One batch through this stage; the stream of the one `coming` is already asked for."""
        width, size = batch.width, self._target.spec.hidden_size
        if self._is_first_batch:
            self._hop.expect((len(batch.samples), width, size))
            self._is_first_batch = False
        if coming is not None:
            self._hop.expect((len(coming.samples), coming.width, size))
        self._stream = self._hop.receive()
        self._sink.aim(batch, states, self._target.model)
        forget_lengths(self._target.model)
        try:
            output = self._forward(pad_right([spool.input_ids(i) for i in batch.samples]).to(self._target.device))
        except torch.OutOfMemoryError as error:
            raise MachineError(
                f"out of memory on {self._target.device} with {len(batch.samples)} x {width} tokens",
                hint="a smaller `--batch-tokens`, or `--pp`",
            ) from error
        require_all(self.owned, self._sink.seen, self._target.model)
        if not self._placement.is_last_stage:
            self._hop.send(output.last_hidden_state)

    def flush(self) -> None:
        """Wait until the last batches have reached the next stage."""
        self._hop.flush()

    def _forward(self, input_ids: torch.Tensor) -> Any:
        caller = self._target.decoder.caller
        if self._stream is None:
            return caller(input_ids=input_ids, **self._options)
        return caller(inputs_embeds=self._stream, **self._options)

    def _hand_over(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Whatever the model did to `inputs_embeds` on the way (scaling, positions) was done on stage 0.
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": self._stream}
        return (self._stream, *args[1:]), kwargs


class RowSink:
    """Copies the real rows of a captured tensor to their place in the shard's buffers, at once."""

    def __init__(self) -> None:
        self.seen: dict[str, bool] = {}

    def aim(self, batch: Batch, states: Buffers, model: nn.Module) -> None:
        """Send what comes next to rows [batch.begin, batch.end) of `states`."""
        self._batch, self._states, self._model = batch, states, model
        self.seen = {}

    def __call__(self, slot: str, stream: torch.Tensor) -> None:
        batch, target = self._batch, self._states[slot]
        expected = (len(batch.samples), batch.width, target.shape[1])
        if slot in self.seen or stream.numel() != expected[0] * expected[1] * expected[2]:
            what = "twice in one forward" if slot in self.seen else f"of shape {list(stream.shape)}"
            raise TargetError(
                f"`{type(self._model).__name__}` gave slot `{slot}` {what}; expected {list(expected)} once"
            )
        self.seen[slot] = True
        rows = pack_rows(stream.detach().reshape(expected), batch.lengths)
        target[batch.begin : batch.end].copy_(rows, non_blocking=True)


def pack_rows(stream_BTD: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The real rows [sum(lengths), D] of right-padded [B, T, D]; a view when there is no padding."""
    if lengths[-1] == stream_BTD.shape[1]:
        return stream_BTD.reshape(-1, stream_BTD.shape[2])
    return torch.cat([row[:length] for row, length in zip(stream_BTD, lengths, strict=True)])


def pad_right(rows: Sequence[NDArray[np.int32]]) -> torch.Tensor:
    """int64 [B, T], the longest row first; each is padded with its own first token, which every model knows."""
    ids = torch.empty((len(rows), len(rows[0])), dtype=torch.int64)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.from_numpy(tokens.copy())
        ids[row, len(tokens) :] = int(tokens[0])
    return ids


def to_numpy(states: torch.Tensor) -> Any:
    """A numpy view of host memory; bfloat16 as its uint16 bits."""
    return states.view(torch.uint16).numpy() if states.dtype is torch.bfloat16 else states.numpy()


def measure_speed(
    target: LoadedTarget, spool: Spool, batches: Sequence[Batch], slots: Sequence[str], seconds: float
) -> float:
    """Tokens per second over `batches`, for about `seconds`, after one batch to warm up."""
    stage = Stage(target, slots, Placement())
    states = stage.buffers(max(batch.end for batch in batches))
    tokens = 0
    with stage.recording():
        stage.run(spool, batches[0], states, coming=None)
        synchronize(target.device)
        began = time.perf_counter()
        for batch in batches:
            stage.run(spool, batch, states, coming=None)
            tokens += sum(batch.lengths)
            if time.perf_counter() - began > seconds:
                break
        synchronize(target.device)
    return tokens / (time.perf_counter() - began)

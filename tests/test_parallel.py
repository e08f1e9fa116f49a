"""Stages, tensor-parallel ranks and replicas make the same shards as one process. Real processes on gloo."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, chat_rows

from fixtures.make import make_tiny
from specctl.core import folder as folders
from specctl.core.extraction import ExtractJob
from specctl.core.launch import run_local
from specctl.core.parallel import Wire
from specctl.core.placement import Placement, check_sizes, place, stage_layers
from specctl.core.plan import order, plan_shards
from specctl.core.pulse import PULSE, Pulse
from specctl.core.recompute import match, to_torch
from specctl.core.samples import fill_spool, open_spool
from specctl.core.split import check_split
from specctl.core.target import describe_target
from specctl.errors import MachineError, NotSupportedError, TargetError, UsageError
from specctl.plugins import load_store
from specctl.records.layers import parse_slots
from specctl.records.progress import Reporter, SilentReporter
from specctl.records.sample import Sample
from specctl.records.shard import Manifest, final_norm_applied

FAMILIES = ("llama", "llama-tied", "qwen3", "gemma2", "gemma3", "moe", "hybrid")
LENGTHS = (37, 5, 20, 20, 3, 61, 48, 9, 2, 33)


@dataclasses.dataclass(frozen=True)
class Several:
    """Runs jobs one after the other on the same ranks: starting ranks costs more than these runs."""

    jobs: tuple[ExtractJob, ...]

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        for job in self.jobs:
            job(placement, reporter)


@dataclasses.dataclass(frozen=True)
class Dies:
    """A rank that is killed, or that fails, while the others wait for it."""

    rank: int
    how: str

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        import torch.distributed as dist

        if placement.stage == self.rank:
            if self.how == "killed":
                os.kill(os.getpid(), 9)
            if self.how == "named":
                raise TargetError("the weights are cracked", where="here")
            raise RuntimeError("an assumption of ours was wrong")
        dist.barrier()


def make_job(folder: Path, family: str, *, slots: str = "all,norm", format: str = "safetensors") -> ExtractJob:
    """A prepared folder and the job that fills it: several shards, several batches each."""
    spec = describe_target(str(make_tiny(family)))
    rng = np.random.default_rng(0)
    samples = [
        Sample(f"s{i}", rng.integers(0, 250, n).astype(np.int32), np.ones(n, np.uint8), "x")
        for i, n in enumerate(LENGTHS)
    ]
    folder.mkdir(parents=True)
    (folder / "shards").mkdir()
    fill_spool(folder / "spool", samples, SilentReporter())
    spool = open_spool(folder / "spool")
    chosen = parse_slots(slots, spec.num_layers)
    settings = {
        "slots": list(chosen),
        "dtype": "float32",
        "hidden_size": spec.hidden_size,
        "final_norm_applied": final_norm_applied(chosen),
        "format": format,
    }
    folders.write_manifest(folder, Manifest(settings=settings, provenance={}))
    return ExtractJob(
        spec=spec,
        folder=folder,
        spool=folder / "spool",
        shards=tuple(plan_shards(spool, order(spool, 0), shard_tokens=100)),
        slots=chosen,
        dtype="float32",
        device="cpu",
        format=format,
        compression="zstd" if format == "parquet" else "none",
        batch_tokens=64,
        allow_overflow=False,
        trust_remote_code=False,
        tokens_before=0,
    )


def shard_bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((folder / "shards").iterdir())}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family extracted by one process."""
    root = tmp_path_factory.mktemp("pp1")
    Several(tuple(make_job(root / family, family) for family in FAMILIES))(Placement(), SilentReporter())
    return root


@pytest.mark.parametrize("stages", [2, 4])
def test_a1_a3_pipeline_stages_write_the_same_bytes_as_one_process(
    one_process: Path, tmp_path: Path, stages: int
) -> None:
    """A1, A3: every slot of every family, layer counts that do not divide, stages without layers."""
    jobs = tuple(make_job(tmp_path / family, family) for family in FAMILIES)
    run_local(Several(jobs), pp=stages, tp=1, device="cpu", reporter=SilentReporter())
    for family in FAMILIES:
        expected, found = shard_bytes(one_process / family), shard_bytes(tmp_path / family)
        assert len(found) > 2
        assert found == expected, family
        assert folders.read_manifest(tmp_path / family) == folders.read_manifest(one_process / family), family


def test_stages_that_own_an_edge_or_nothing_write_the_same_bytes(tmp_path: Path) -> None:
    """Slots at the border of two stages, only on one stage, and both containers."""
    cases = [("4", "safetensors"), ("5", "safetensors"), ("0", "safetensors"), ("norm", "safetensors")]
    cases += [("last", "parquet"), ("3,4,norm", "parquet")]
    names = [f"{slots}-{container}" for slots, container in cases]
    for root in ("one", "two"):
        jobs = [
            make_job(tmp_path / root / name, "llama", slots=slots, format=container)
            for name, (slots, container) in zip(names, cases, strict=True)
        ]
        run_local(Several(tuple(jobs)), pp=1 if root == "one" else 2, tp=1, device="cpu", reporter=SilentReporter())
    for name in names:
        assert shard_bytes(tmp_path / "one" / name) == shard_bytes(tmp_path / "two" / name), name


def test_two_tensor_parallel_ranks_give_the_same_states(one_process: Path, tmp_path: Path) -> None:
    families = ("llama", "qwen3", "gemma3")
    jobs = tuple(make_job(tmp_path / family, family) for family in families)
    run_local(Several(jobs), pp=1, tp=2, device="cpu", reporter=SilentReporter())
    store = load_store("safetensors")
    for family, job in zip(families, jobs, strict=True):
        for path in sorted((tmp_path / family / "shards").iterdir()):
            found, expected = store.open_shard(path), store.open_shard(one_process / family / "shards" / path.name)
            for slot in job.slots:
                pair = [to_torch(shard.slot(slot), "float32") for shard in (found, expected)]
                # Of the slot's scale. Gemma's random weights amplify rounding: there the direction is held.
                limit = 1e-5 * max(1.0, float(pair[1].abs().max()))
                found_match = match(slot, *pair)
                assert found_match.min_cosine > 1 - 1e-8, (family, slot)
                assert found_match.max_difference < limit or family == "gemma3", (family, slot)


def test_ranks_of_two_torchrun_groups_share_one_folder(tmp_path: Path, tiny) -> None:
    """Two nodes of two ranks: two replicas of two stages each make one manifest, and the pipeline
    across the groups too makes the bytes of one process."""
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(30)))
    common = ["extract", tiny("llama"), str(data), "--batch-tokens", "100", "--device", "cpu", "--dtype", "float32"]
    config = tmp_path / "run.toml"
    config.write_text("shard_mib = 1\n")
    common += ["--config", str(config), "--layers", "all,norm"]
    one = subprocess.run(
        [sys.executable, "-m", "specctl", *common, "--out", str(tmp_path / "one")], cwd=ROOT, check=False
    )
    assert one.returncode == 0
    for name, nodes, per_node, pp in (("replicas", 2, 2, 2), ("across", 2, 1, 2)):
        out = tmp_path / name
        port = _free_port()
        groups = [
            subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        f"--nnodes={nodes}",
                        f"--nproc-per-node={per_node}",
                    ),
                    *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "specctl"),
                    *(*common, "--out", str(out), "--pp", str(pp)),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for node in range(nodes)
        ]
        outputs = [group.communicate(timeout=180) for group in groups]
        assert [group.returncode for group in groups] == [0, 0], outputs
        assert sum("samples" in stdout for stdout, _ in outputs) == 1, "one report, from one rank"
        assert folder_bytes(out) == folder_bytes(tmp_path / "one"), name


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [("killed", MachineError, "rank 1 was ended by SIGKILL"), ("named", TargetError, "the weights are cracked")],
)
def test_a_rank_that_ends_ends_the_run_with_its_cause(how: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        run_local(Dies(1, how), pp=2, tp=1, device="cpu", reporter=SilentReporter())


@dataclasses.dataclass(frozen=True)
class GetsStuck:
    """Steps of `seconds` for a token, and at last one that does not end."""

    rank: int
    seconds: float

    def __call__(self, placement: Placement, reporter: Reporter) -> None:
        for tokens in (1, 2):
            with PULSE.step(tokens):
                time.sleep(self.seconds * tokens)
        if placement.stage == self.rank:
            with PULSE.step(1):
                time.sleep(600)
        else:
            Wire(torch.device("cpu")).receive((1,), torch.int64, self.rank, tag=0)


def test_a_rank_that_lives_and_does_not_get_on_is_named_and_one_that_waits_for_it_is_not() -> None:
    began = time.monotonic()
    with pytest.raises(MachineError, match="rank 1: hangs: a step goes on for"):
        run_local(GetsStuck(1, 0.01), pp=2, tp=1, device="cpu", reporter=SilentReporter(), silence_s=3.0)
    assert time.monotonic() - began < 60


def test_a_step_may_take_as_long_as_its_tokens_and_the_steps_before_allow() -> None:
    pulse = Pulse()
    with pulse.step(1):
        assert pulse.stuck_for(0.0) is None, "the first has all the time it takes"
        time.sleep(0.05)
    with pulse.step(10):
        time.sleep(0.2)
        assert pulse.stuck_for(0.0) is None
    with pulse.step(1):
        time.sleep(0.2)
        assert pulse.stuck_for(1.0) is None
        assert pulse.stuck_for(0.0) is not None
    assert pulse.stuck_for(0.0) is None


@pytest.mark.parametrize("family", ["multimodal", "gpt2"])
def test_a4_a_layout_that_cannot_be_split_is_refused_by_name_before_weights_load(family: str, tmp_path: Path) -> None:
    """A4: the folder has no weights at all here, and the refusal comes all the same."""
    spec = describe_target(str(make_tiny(family)))
    for file in Path(spec.path).iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    bare = dataclasses.replace(spec, path=str(tmp_path))
    with pytest.raises(NotSupportedError, match=r"cannot run on pipeline stages: its layers are at"):
        check_split(bare, pp=2, tp=1)
    assert check_split(bare, pp=1, tp=1) is None


def test_both_axes_at_once_are_refused_naming_them() -> None:
    with pytest.raises(NotSupportedError, match="`--pp 2` with `--tp 2`"):
        check_sizes(2, 2)


@pytest.mark.parametrize(("pp", "tp"), [(0, 1), (1, 0), (-1, 1)])
def test_sizes_below_one_are_a_usage_error(pp: int, tp: int) -> None:
    with pytest.raises(UsageError, match="must be at least 1"):
        check_sizes(pp, tp)


def test_heads_that_do_not_divide_over_tensor_parallel_ranks_are_named() -> None:
    spec = describe_target(str(make_tiny("llama")))
    with pytest.raises(TargetError, match="`num_attention_heads` is 4"):
        check_split(spec, pp=1, tp=3)


def test_layers_that_do_not_divide_are_told_before_loading() -> None:
    spec = describe_target(str(make_tiny("qwen3")))
    assert check_split(spec, pp=4, tp=1) == "7 layers on 4 stages: 2, 2, 2, 1"
    assert stage_layers(36, 8) == [5, 5, 5, 5, 4, 4, 4, 4]


def test_ranks_beyond_one_pipeline_are_replicas() -> None:
    placements = [place(rank, 6, rank, pp=2, tp=1) for rank in range(6)]
    assert [(p.replica, p.stage) for p in placements] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(p.num_replicas == 3 for p in placements)

"""`specctl train`: a run is the same however it is cut, what it saves is served, and what it cannot do it refuses."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, chat_rows
from train_parts import extracted, one_step

from specctl.core import trainstate
from specctl.core.corpus import Corpus, boundaries_of, is_held_out
from specctl.core.packing import epoch_order, pack, training_rows
from specctl.core.placement import Placement
from specctl.core.trainrun import TrainJob, first_model
from specctl.core.trainsetup import prepare
from specctl.core.vocab import choose_vocabulary, coverage
from specctl.errors import DataError, SettingsChangedError, ShardError, UsageError
from specctl.files.safetensors import read_header
from specctl.files.tensors import read_array
from specctl.recipes.check import check
from specctl.recipes.train import train
from specctl.records.check import CheckConfig
from specctl.records.extraction import ExtractConfig
from specctl.records.progress import SilentReporter
from specctl.records.training import TrainConfig

QUIET = SilentReporter()
RESERVED = 263


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory) -> str:
    """States of a tiny Llama for 40 chats."""
    return extracted(tiny("llama"), chat_rows(40), tmp_path_factory.mktemp("shards"))


@pytest.fixture
def config(tiny, shards, tmp_path) -> TrainConfig:
    return replace(
        one_step(tiny("llama"), shards, tmp_path / "run"),
        max_steps=8,
        eval_fraction=0.2,
        eval_every=4,
        save_every=4,
        log_every=1,
    )


def parallel(config: TrainConfig) -> TrainConfig:
    return replace(config, parallel_drafting=True, ptd_token_id=RESERVED)


KINDS = pytest.mark.parametrize("kind", [lambda c: c, parallel], ids=["eagle3", "peagle"])


def weights(folder: str | Path) -> dict[str, np.ndarray]:
    entries, _ = read_header(Path(folder) / "draft" / "model.safetensors")
    return {name: read_array(entry) for name, entry in entries.items()}


def masters(out: str | Path) -> dict[str, torch.Tensor]:
    newest = trainstate.newest(Path(out))
    assert newest is not None
    return torch.load(newest / "state.pt", weights_only=True)["model"]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# -- a run and what it leaves -----------------------------------------------------------------------------------------


@KINDS
def test_the_loss_starts_near_ln_of_the_vocabulary_and_falls(kind, config) -> None:
    report = train(replace(kind(config), max_steps=60, init_head="fresh", lr=5e-3), QUIET)
    assert report is not None
    lines = [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    # KL against a teacher that is not uniform: less than ln(W) by the teacher's own entropy.
    assert losses[0] <= math.log(64) * 1.05
    assert np.mean(losses[-5:]) < 0.9 * losses[0]


@KINDS
def test_cross_entropy_starts_within_5_percent_of_ln_of_the_vocabulary(kind, config) -> None:
    train(replace(kind(config), max_steps=1, init_head="fresh", loss="ce"), QUIET)
    first = json.loads((Path(config.out) / "log.jsonl").read_text().splitlines()[0])
    assert abs(first["loss"] / math.log(64) - 1) < 0.05


@KINDS
def test_the_draft_passes_the_check_in_vllm(kind, config) -> None:
    report = train(kind(config), QUIET)
    assert report is not None
    assert report.passes, report.verdict
    again = check(CheckConfig(report.draft, config.target, deep=True), QUIET)
    # A trained embedding is not the target's, and that is said.
    expected = ["EMBED_DIFFERS"] if kind is parallel else []
    assert [f.rule for f in again.findings if f.level != "note"] == expected
    settings = json.loads((Path(report.draft) / "config.json").read_text())
    assert settings["eagle_aux_hidden_state_layer_ids"] == [2, 4, 8]
    assert settings["tie_word_embeddings"] is False
    assert "quantization_config" not in settings
    assert settings["rope_theta"] == settings["rope_parameters"]["rope_theta"]
    if kind is parallel:
        assert {settings[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")} == {RESERVED}
        assert settings["parallel_drafting"] is True


@KINDS
def test_b6_the_report_says_how_far_training_is_from_serving(kind, config, run_cli) -> None:
    report = train(kind(config), QUIET)
    assert report is not None
    if report.flat_gap is None:
        assert not kind(config).parallel_drafting
    else:
        assert report.flat_gap < 1e-6


def test_a_frozen_embedding_is_left_to_the_target_and_a_trained_one_is_saved(config) -> None:
    train(config, QUIET)
    assert "embed_tokens.weight" not in weights(config.out)
    other = replace(parallel(config), out=config.out + "-p")
    train(other, QUIET)
    assert weights(other.out)["embed_tokens.weight"].shape == (264, 32)


@pytest.mark.parametrize("part", ["train_embedding", "train_head"])
def test_a_frozen_part_does_not_move(part, config) -> None:
    """The optimizer's decay would move it too, if it were among its parameters."""
    frozen = replace(parallel(config), **{part: False}, weight_decay=0.1)
    setup = prepare(frozen, torch.device("cpu"))
    before = first_model(setup, frozen).state_dict()
    train(frozen, QUIET)
    after = masters(config.out)
    name = {"train_embedding": "embed_tokens.weight", "train_head": "lm_head.weight"}[part]
    for key in (key for key in after if after[key].is_floating_point()):
        assert torch.equal(before[key], after[key]) == (key == name), key


def test_a_tied_target_teaches_with_its_embedding_and_the_draft_is_not_tied(tiny, config, tmp_path) -> None:
    from specctl.recipes.extract import extract

    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(12)))
    extract(ExtractConfig(tiny("llama-tied"), (str(data),), str(tmp_path / "s"), layers="1,last,norm"), QUIET)
    report = train(
        replace(config, shards=(str(tmp_path / "s"),), target=tiny("llama-tied"), draft_vocab_size=32, max_steps=1),
        QUIET,
    )
    assert report is not None
    assert report.passes
    saved = weights(config.out)
    assert saved["lm_head.weight"].shape == (32, 32)
    assert json.loads((Path(report.draft) / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_report_and_the_log_count_what_was_seen(config) -> None:
    report = train(config, QUIET)
    assert report is not None
    lines = [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 9))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [4, 8]
    assert report.samples + report.held_out == 40
    assert 1.0 <= report.evaluation.acceptance_length <= 4.0
    assert lines[-1]["acceptance_length"] == report.evaluation.acceptance_length


# -- the same run, however it is cut ----------------------------------------------------------------------------------


@KINDS
def test_a_resumed_run_ends_in_the_same_bits(kind, config, tmp_path) -> None:
    whole = replace(kind(config), out=str(tmp_path / "whole"))
    train(whole, QUIET)
    parts = replace(kind(config), out=str(tmp_path / "parts"))
    process = start(parts)
    kill_after_checkpoint(process, Path(parts.out))
    train(replace(parts, resume=True), QUIET)
    assert_same(masters(whole.out), masters(parts.out))
    assert (Path(whole.out) / "draft/model.safetensors").read_bytes() == (
        Path(parts.out) / "draft/model.safetensors"
    ).read_bytes()


def start(config: TrainConfig) -> subprocess.Popen[bytes]:
    """The run as a process of its own."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from specctl.records.training import TrainConfig\nfrom specctl.recipes.train import train\n"
        "from specctl.records.progress import SilentReporter\n"
        f"if __name__ == '__main__':\n    train({config!r}, SilentReporter())\n"
    )
    script = Path(config.out).with_suffix(".py")
    script.write_text(code)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=env, start_new_session=True)


def kill_after_checkpoint(process: subprocess.Popen[bytes], out: Path) -> None:
    """SIGKILL to every process of the run as soon as the first checkpoint is whole."""
    deadline = time.monotonic() + 60
    while trainstate.newest(out) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert trainstate.newest(out) is not None


@KINDS
def test_two_processes_give_the_run_of_one(kind, config, tmp_path) -> None:
    one = replace(kind(config), out=str(tmp_path / "one"), accumulate=2, max_steps=4)
    two = replace(one, out=str(tmp_path / "two"), nproc=2)
    train(one, QUIET)
    process = start(two)
    assert process.wait(120) == 0
    assert_close(masters(one.out), masters(two.out))


def assert_close(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.allclose(first[name].double(), second[name].double(), rtol=1e-4, atol=1e-6), name


@KINDS
def test_a_shared_model_gives_the_run_of_one_and_goes_on_alone(kind, config, tmp_path) -> None:
    """An odd window leaves one rank without a row; the checkpoint is whole, so any number of ranks goes on."""
    one = replace(kind(config), out=str(tmp_path / "one"), accumulate=4, max_steps=None, epochs=1.0, save_every=1)
    shared = replace(one, out=str(tmp_path / "shared"), nproc=2, fsdp=True)
    report = train(one, QUIET)
    assert start(shared).wait(120) == 0
    assert_close(masters(one.out), masters(shared.out))
    scores = [last_evaluation(run.out) for run in (one, shared)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
    assert report is not None and report.steps > 2
    shutil.rmtree(trainstate.checkpoints(Path(shared.out))[-1])
    train(replace(shared, nproc=1, fsdp=False, resume=True), QUIET)
    assert_close(masters(one.out), masters(shared.out))


def last_evaluation(out: str) -> float:
    lines = [json.loads(line) for line in (Path(out) / "log.jsonl").read_text().splitlines()]
    found: float = [line["acceptance_length"] for line in lines if line["kind"] == "eval"][-1]
    return found


@pytest.mark.parametrize(
    ("kind", "is_shared"),
    [
        pytest.param(lambda c: c, False, id="eagle3-replicated"),
        pytest.param(parallel, True, id="peagle-shared"),
        pytest.param(lambda c: c, True, id="eagle3-shared", marks=pytest.mark.slow),
        pytest.param(parallel, False, id="peagle-replicated", marks=pytest.mark.slow),
    ],
)
def test_two_processes_resume_to_the_same_bits(kind, is_shared, config, tmp_path) -> None:
    whole = replace(kind(config), out=str(tmp_path / "whole"), accumulate=2, nproc=2, fsdp=is_shared)
    parts = replace(whole, out=str(tmp_path / "parts"))
    process = start(parts)
    assert start(whole).wait(120) == 0
    kill_after_checkpoint(process, Path(parts.out))
    assert start(replace(parts, resume=True)).wait(120) == 0
    assert_same(masters(whole.out), masters(parts.out))


def test_accumulated_rows_weigh_by_their_elements_not_by_row(config, tmp_path) -> None:
    long = replace(config, out=str(tmp_path / "long"), batch_tokens=100_000, accumulate=1, epochs=1.0, max_steps=None)
    cut = replace(long, out=str(tmp_path / "cut"), batch_tokens=200, accumulate=1000)
    train(long, QUIET)
    train(cut, QUIET)
    first, second = masters(long.out), masters(cut.out)
    for name in first:
        assert torch.allclose(first[name].double(), second[name].double(), rtol=1e-3, atol=1e-5), name


def test_the_last_partial_window_is_a_step_of_its_own(config) -> None:
    setup = prepare(replace(config, max_steps=None, epochs=1.0, accumulate=4), torch.device("cpu"))
    from specctl.core.training import step_windows

    sizes = [len(window) for window in step_windows(setup.task, 0)]
    assert sum(sizes) == setup.task.total_rows
    assert len(sizes) == setup.task.total_steps
    assert set(sizes[:-1]) <= {4}


def test_resuming_skips_no_row_and_repeats_none(shards) -> None:
    corpus = Corpus([Path(shards)], (2, 4))
    rows = training_rows(corpus.places, 256, seed=3, weights=(1.0,))
    first = [next(rows) for _ in range(12)]
    again = training_rows(corpus.places, 256, seed=3, weights=(1.0,), skip=5)
    assert [next(again) for _ in range(7)] == first[5:]
    assert [row.number for row in first] == list(range(12))


# -- data -------------------------------------------------------------------------------------------------------------


def test_every_sample_is_seen_once_an_epoch_and_rows_hold_whole_samples(shards) -> None:
    corpus = Corpus([Path(shards)], (2, 4))
    for epoch in (0, 1):
        order = epoch_order(corpus.places, epoch=epoch, seed=0, weights=(1.0,))
        assert sorted(order, key=str) == sorted(corpus.places, key=str)
        rows = list(pack(order, 256, epoch=epoch))
        assert [place for row in rows for place in row.places] == order
        assert all(len(row) <= 256 or len(row.places) == 1 for row in rows)
    assert epoch_order(corpus.places, epoch=0, seed=0, weights=(1.0,)) != order


def test_folders_are_mixed_by_weight(shards) -> None:
    corpus = Corpus([Path(shards), Path(shards)], (2, 4))
    order = epoch_order(corpus.places, epoch=0, seed=0, weights=(2.0, 0.25))
    assert sum(place.folder == 0 for place in order) == 80
    assert sum(place.folder == 1 for place in order) == 10


def test_held_out_samples_are_those_of_their_ids() -> None:
    held = [is_held_out(f"chat-{i}", 0.25, 0) for i in range(2000)]
    assert 400 < sum(held) < 600
    assert held[:100] == [is_held_out(f"chat-{i}", 0.25, 0) for i in range(100)]
    assert all(is_held_out(f"chat-{i}", 0.5, 0) for i in range(2000) if held[i])


def test_the_vocabulary_is_the_most_frequent_with_the_ends_always_in() -> None:
    counts = torch.tensor([0.0, 5, 1, 9, 9, 0, 2])
    assert choose_vocabulary(counts, 3, always=()).tolist() == [1, 3, 4]
    assert choose_vocabulary(counts, 3, always=(5,)).tolist() == [3, 4, 5]
    assert choose_vocabulary(counts, 6, always=()).tolist() == [0, 1, 2, 3, 4, 6]
    assert coverage(counts, torch.tensor([3, 4])) == pytest.approx(18 / 26)
    for size, always in ((0, ()), (8, ()), (1, (1, 2))):
        with pytest.raises(UsageError):
            choose_vocabulary(counts, size, always=always)


def test_end_tokens_are_in_the_draft_vocabulary(config) -> None:
    setup = prepare(replace(config, draft_vocab_size=8), torch.device("cpu"))
    assert setup.vocabulary is not None
    assert 259 in setup.vocabulary.tolist()


def damaged(shards: str, folder: Path, count: int) -> str:
    """A copy of the shards in which the first `count` samples hold NaN."""
    shutil.copytree(shards, folder)
    (path,) = (folder / "shards").glob("*.safetensors")
    entries, _ = read_header(path)
    offsets = read_array(entries["offsets"])
    entry = entries["hidden.4"]
    data = bytearray(path.read_bytes())
    for sample in range(count):
        at = entry.begin + int(offsets[sample]) * entry.nbytes // entry.shape[0]
        data[at : at + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    return str(folder)


def test_samples_with_nan_are_left_out_and_counted(config, shards, tmp_path) -> None:
    report = train(
        replace(config, shards=(damaged(shards, tmp_path / "nan", 3),), eval_fraction=0.0, max_steps=None, epochs=1.0),
        QUIET,
    )
    assert report is not None
    assert report.bad_samples == 3
    assert all(np.isfinite(values).all() for values in weights(config.out).values() if values.dtype.kind == "f")


def test_too_many_bad_samples_stop_the_run(config, shards, tmp_path) -> None:
    with pytest.raises(DataError, match="not finite"):
        train(replace(config, shards=(damaged(shards, tmp_path / "nan", 20),), max_steps=None, epochs=1.0), QUIET)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel_drafting": True}, "needs `--ptd-token-id`"),
        ({"parallel_drafting": True, "ptd_token_id": 264}, "not in the target's vocabulary"),
        ({"parallel_drafting": True, "ptd_token_id": -1}, "not in the target's vocabulary"),
        ({"parallel_drafting": True, "ptd_token_id": 259}, "ends the target's texts"),
        ({"parallel_drafting": True, "ptd_token_id": 258}, "occurs"),
        ({"ptd_token_id": 3}, "only with `--parallel-drafting`"),
        ({"layers": "3"}, "the shards hold 2, 4, 8"),
        ({"max_steps": 4, "epochs": 1.0}, "both say how long"),
        ({"batch_tokens": 0}, "not 1 or more"),
        ({"lr": 0.0}, "not above 0"),
        ({"eval_fraction": 1.0}, "not from 0 to below 1"),
        ({"schedule": "step"}, "`schedule` is"),
        ({"nproc": 3, "accumulate": 2}, "no multiple of the 3 processes"),
        ({"weights": (1.0, 2.0)}, "2 `weights` for 1 shard folders"),
        ({"num_draft_tokens": 0}, "num-draft-tokens"),
        ({"draft_vocab_size": 0}, "draft-vocab-size"),
    ],
)
def test_settings_without_a_meaning_are_refused(changes, message, config) -> None:
    with pytest.raises(UsageError, match=message):
        train(replace(config, **changes), QUIET)


def test_reserved_id_0_is_allowed(config) -> None:
    report = train(replace(config, parallel_drafting=True, ptd_token_id=0, max_steps=1), QUIET)
    assert report is not None
    assert report.passes


def test_a_second_run_needs_resume_and_the_same_settings(config) -> None:
    with pytest.raises(UsageError, match="nothing to resume"):
        train(replace(config, resume=True), QUIET)
    train(replace(config, max_steps=4), QUIET)
    with pytest.raises(UsageError, match="holds a run already"):
        train(config, QUIET)
    with pytest.raises(SettingsChangedError, match="draft_vocab_size: 64 -> 32"):
        train(replace(config, resume=True, draft_vocab_size=32), QUIET)
    report = train(replace(config, resume=True), QUIET)
    assert report is not None
    assert report.steps == 8


def test_resuming_a_finished_run_says_again_what_it_made(config) -> None:
    first = train(config, QUIET)
    again = train(replace(config, resume=True), QUIET)
    assert first is not None
    assert again is not None
    assert (again.steps, again.loss, again.evaluation) == (first.steps, first.loss, first.evaluation)


def test_a_folder_with_other_files_is_left_alone(config) -> None:
    Path(config.out).mkdir()
    (Path(config.out) / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="other files"):
        train(config, QUIET)
    assert [path.name for path in Path(config.out).iterdir()] == ["thesis.txt"]


def test_shards_of_another_target_or_without_norm_are_refused(tiny, config, tmp_path) -> None:
    with pytest.raises(UsageError, match=r"the shards are of a target whose num_layers"):
        train(replace(config, target=tiny("llama-tied")), QUIET)
    from specctl.recipes.extract import extract

    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chat_rows(4)))
    extract(ExtractConfig(tiny("llama"), (str(data),), str(tmp_path / "s"), layers="2,4,5"), QUIET)
    with pytest.raises(ShardError, match="no slot `norm`"):
        train(replace(config, shards=(str(tmp_path / "s"),), out=str(tmp_path / "r")), QUIET)


@KINDS
def test_a_run_starts_from_an_earlier_draft_and_keeps_its_map(kind, config, tmp_path) -> None:
    first = train(kind(config), QUIET)
    assert first is not None
    report = train(
        replace(
            kind(config),
            out=str(tmp_path / "second"),
            init_from=first.draft,
            draft_vocab_size=None,
            max_steps=1,
            lr=1e-9,
        ),
        QUIET,
    )
    assert report is not None
    old, new = weights(config.out), weights(tmp_path / "second")
    assert np.array_equal(old["d2t"], new["d2t"])
    assert np.allclose(old["fc.weight"], new["fc.weight"], atol=1e-2)


def test_all_stored_layers_are_read_unless_named(shards) -> None:
    from specctl.core.corpus import complete_manifest

    manifest = complete_manifest(Path(shards))
    assert boundaries_of(manifest, Path(shards), None) == (2, 4, 8)
    assert boundaries_of(manifest, Path(shards), "last,2") == (2, 8)


def test_the_job_travels_to_other_processes(config) -> None:
    import pickle

    job = pickle.loads(pickle.dumps(TrainJob(config)))
    assert job.config == config
    assert Placement().num_stages == 1


def test_the_command_trains_and_says_what_it_made(config, run_cli) -> None:
    arguments = ["train", *config.shards, "--target", config.target, "--out", config.out, "--max-steps", 2]
    process = run_cli(*arguments, "--draft-vocab-size", 64, "--batch-tokens", 256, "--json")
    assert process.returncode == 0, process.stderr
    record = json.loads(process.stdout)
    assert record["report"]["verdict"] == "passes"
    again = run_cli(*arguments)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


# -- beside the run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_run_is_inspected_and_drawn(suffix, config, tmp_path, run_cli) -> None:
    train(config, QUIET)
    picture = tmp_path / f"run{suffix}"
    process = run_cli("inspect", config.out, "--plot", picture, "--json")
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)["report"]
    assert [entry[0] for entry in report["losses"]] == list(range(1, 9))
    assert [entry["step"] for entry in report["evaluations"]] == [4, 8]
    assert picture.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_a_log_that_a_kill_cut_is_read_up_to_there(config) -> None:
    from specctl.errors import InputError
    from specctl.recipes.inspectrun import inspect_run

    train(config, QUIET)
    log = Path(config.out) / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    assert inspect_run(Path(config.out)).steps == 8
    log.write_text("nothing\n" + log.read_text())
    with pytest.raises(InputError, match="line 1 of the log"):
        inspect_run(Path(config.out))


def test_a_dry_run_refuses_the_folder_that_the_run_would_refuse(config, tmp_path) -> None:
    from specctl.recipes.trainplan import plan_training

    with pytest.raises(UsageError, match="nothing to resume"):
        plan_training(replace(config, resume=True), QUIET)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds other files"):
        plan_training(config, QUIET)
    (tmp_path / "run" / "thesis.txt").unlink()
    train(replace(config, max_steps=1), QUIET)
    with pytest.raises(UsageError, match="holds a run already"):
        plan_training(config, QUIET)
    with pytest.raises(SettingsChangedError, match="draft_vocab_size: 64 -> 32"):
        plan_training(replace(config, resume=True, draft_vocab_size=32), QUIET)


def test_a_dry_run_writes_nothing_and_counts_what_the_run_will_have(config, run_cli) -> None:
    from specctl.recipes.trainplan import plan_training

    plan = plan_training(config, QUIET)
    assert not Path(config.out).exists()
    report = train(config, QUIET)
    assert report is not None
    assert (plan.parameters, plan.trained_parameters) == (report.parameters, report.trained_parameters)
    assert (plan.samples, plan.held_out, plan.steps) == (report.samples, report.held_out, report.steps)
    state = next((Path(config.out) / "checkpoints").glob("*/state.pt")).stat().st_size
    assert plan.disk_bytes / config.keep == pytest.approx(state, rel=0.5)


def test_a_sink_that_is_unknown_or_not_installed_is_refused_before_training(config) -> None:
    with pytest.raises(UsageError, match="is none"):
        train(replace(config, log="csv"), QUIET)
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="needs the package `wandb`"):
            train(replace(config, log="wandb", out=config.out + "2"), QUIET)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_each_recipe_is_a_config_of_this_command(path) -> None:
    import tomllib

    from specctl.cli.options import _typed
    from specctl.core.trainsetup import draft_settings
    from specctl.recipes.train import refuse

    values = tomllib.loads(path.read_text())
    types = {name: field.type for name, field in TrainConfig.__dataclass_fields__.items()}
    assert set(values) <= set(types)
    typed = {name: _typed(name, value, types[name], path) for name, value in values.items()}
    config = TrainConfig(shards=("s",), target="t", out="o", **typed)
    refuse(config)
    settings = draft_settings(config)
    assert settings.num_draft_tokens == values["num_draft_tokens"]
    assert path.read_text().startswith("#")
    assert config.parallel_drafting == ("peagle" in path.stem)

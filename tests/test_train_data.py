"""What `specctl train` makes of its data: vocabulary, split, mixing, loading, bad samples, folders that do not fit."""

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import chat_rows
from safetensors.numpy import load_file, save, save_file
from train_parts import extracted, one_step

from specctl.core.corpus import Corpus, is_held_out
from specctl.core.folder import TOKEN_COUNTS
from specctl.core.packing import Row, epoch_order, training_rows
from specctl.core.rowloader import load_row, loaded_ahead
from specctl.core.trainsetup import Ready, doubts, prepare
from specctl.core.vocab import choose_vocabulary, supervised_counts
from specctl.errors import DataError, ShardError, UsageError
from specctl.files.safetensors import read_header
from specctl.files.tensors import read_array
from specctl.recipes.train import train
from specctl.records.progress import SilentReporter
from specctl.records.training import TrainConfig

QUIET = SilentReporter()
RESERVED, VOCAB = 263, 264
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shards(tiny, tmp_path_factory) -> str:
    """States of a tiny Llama for ten chats."""
    return extracted(tiny("llama"), chat_rows(10), tmp_path_factory.mktemp("a"))


@pytest.fixture(scope="module")
def others(tiny, tmp_path_factory) -> str:
    """Ten other chats, their slots in another order."""
    return extracted(tiny("llama"), chat_rows(10, seed=1), tmp_path_factory.mktemp("b"), layers="norm,last,4,2")


@pytest.fixture
def config(tiny, shards, tmp_path) -> TrainConfig:
    return one_step(tiny("llama"), shards, tmp_path / "run")


@pytest.fixture
def copied(shards, tmp_path) -> Callable[[], Path]:
    """A copy of the shards, to be spoiled."""
    return lambda: Path(shutil.copytree(shards, tmp_path / "copy"))


def parallel(config: TrainConfig) -> TrainConfig:
    return replace(config, parallel_drafting=True, ptd_token_id=RESERVED)


def ready(config: TrainConfig) -> Ready:
    return prepare(config, CPU)


def a_copy(target: str, folder: Path) -> Path:
    """A copy of a target, to be changed."""
    return Path(shutil.copytree(target, folder))


# -- the draft's vocabulary -------------------------------------------------------------------------------------------


def test_a_small_corpus_still_fills_the_vocabulary_with_the_ends_in_it() -> None:
    """Fewer tokens than places ended in a shape error (sgl-project/SpecForge#76)."""
    counts = torch.zeros(64, dtype=torch.float64)
    counts[[5, 9]] = torch.tensor([3.0, 1.0], dtype=torch.float64)
    assert choose_vocabulary(counts, 6, always=(63, 63, 62)).tolist() == [0, 1, 5, 9, 62, 63]
    assert choose_vocabulary(counts, 2, always=(63, 62)).tolist() == [62, 63]
    assert choose_vocabulary(counts, 3, always=(64, -1)).tolist() == [0, 5, 9]
    with pytest.raises(UsageError, match="does not hold the 2 tokens"):
        choose_vocabulary(counts, 1, always=(63, 62))


def test_ends_that_only_the_generation_config_names_are_in_the_draft_vocabulary(config, tmp_path) -> None:
    target = a_copy(config.target, tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 261]}))
    found = ready(replace(config, target=str(target), draft_vocab_size=8))
    assert found.vocabulary is not None
    assert {258, 259, 261} <= set(found.vocabulary.tolist())
    assert found.head.eos_token_id == (258, 259, 261)
    with pytest.raises(UsageError, match="does not hold the 3 tokens"):
        ready(replace(config, target=str(target), draft_vocab_size=2))
    with pytest.raises(UsageError, match="`--ptd-token-id 261` ends the target's texts"):
        ready(replace(parallel(config), target=str(target), ptd_token_id=261))


def test_a_draft_vocabulary_larger_than_the_targets_is_refused_and_the_default_takes_all_of_a_small_one(config) -> None:
    with pytest.raises(UsageError, match=r"`--draft-vocab-size 265` is not from 1 to the target's 264"):
        ready(replace(config, draft_vocab_size=VOCAB + 1))
    for size in (VOCAB, None):
        found = ready(replace(config, draft_vocab_size=size))
        assert found.head.draft_vocab_size == VOCAB
        assert found.vocabulary is None


def test_another_size_makes_another_map_of_the_same_shards(config) -> None:
    """A map kept under a key without its size was taken for another size (vllm-project/speculators#1081)."""
    for size in (4, 8):
        found = ready(replace(config, draft_vocab_size=size))
        assert found.vocabulary is not None
        assert len(set(found.vocabulary.tolist())) == size


def test_counts_are_those_of_the_folders_in_their_weights(shards, others) -> None:
    one, other = (
        torch.from_numpy(load_file(Path(folder) / TOKEN_COUNTS)["supervised"]).double() for folder in (shards, others)
    )
    folders = [Path(shards), Path(others)]
    assert torch.equal(supervised_counts(folders, (2.0, 0.5), vocab_size=VOCAB), 2 * one + 0.5 * other)


def without(counts: Path) -> None:
    counts.unlink()


def cut(counts: Path) -> None:
    counts.write_bytes(counts.read_bytes()[:40])


def unnamed(counts: Path) -> None:
    counts.write_bytes(save({"others": np.zeros(VOCAB, np.int64)}))


def short(counts: Path) -> None:
    counts.write_bytes(save({name: array[:100] for name, array in load_file(counts).items()}))


def fractions(counts: Path) -> None:
    counts.write_bytes(save({name: array.astype(np.float32) for name, array in load_file(counts).items()}))


@pytest.mark.parametrize("spoil", [without, cut, unnamed, short, fractions])
def test_token_counts_that_cannot_be_used_are_an_error_where_they_are_needed(spoil, config, copied) -> None:
    """speculators trains on the whole vocabulary then, with a warning only."""
    folder = copied()
    spoil(folder / TOKEN_COUNTS)
    spoiled = replace(config, shards=(str(folder),))
    with pytest.raises(ShardError, match="token"):
        ready(spoiled)
    with pytest.raises(ShardError, match="token"):
        ready(parallel(replace(spoiled, draft_vocab_size=None)))
    assert ready(replace(spoiled, draft_vocab_size=None)).vocabulary is None


# -- what is held out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.2, 0.9, 0.0])
def test_every_sample_is_either_trained_on_or_held_out(fraction: float) -> None:
    """Two roundings of one ratio put a sample on both sides (vllm-project/speculators#868)."""
    held = [is_held_out(f"chat-{i}", fraction, 0) for i in range(12501)]
    assert sum(held) == pytest.approx(12501 * fraction, abs=4 * math.sqrt(12501 * fraction * (1 - fraction)) + 1e-9)
    # A larger share keeps what a smaller one holds out, and other samples change nothing.
    assert all(is_held_out(f"chat-{i}", min(fraction + 0.05, 1), 0) for i, is_held in enumerate(held) if is_held)


def test_one_sample_is_on_one_side(config, tiny, tmp_path) -> None:
    alone = replace(config, shards=(extracted(tiny("llama"), chat_rows(1), tmp_path / "one"),))
    sides = set()
    for fraction in (0.0, 0.5, 0.999):
        try:
            found = ready(replace(alone, eval_fraction=fraction)).task
            sides.add((len(found.training), len(found.held_out)))
        except DataError as error:
            assert "no sample is left" in error.message
            sides.add((0, 1))
    assert sides == {(1, 0), (0, 1)}


def test_a_sample_that_two_folders_hold_is_on_one_side(config, shards, others) -> None:
    task = ready(replace(config, shards=(shards, others, shards), eval_fraction=0.4)).task
    held, kept = ({place.sample_id for place in places} for places in (task.held_out, task.training))
    assert held
    assert not held & kept
    assert len(task.held_out) + len(task.training) == 30


@pytest.mark.parametrize("fraction", [1.0, 1.5, -0.1, math.nan])
def test_a_share_that_holds_out_everything_or_nothing_sensible_is_refused(fraction: float, config) -> None:
    with pytest.raises(UsageError, match="not from 0 to below 1"):
        train(replace(config, eval_fraction=fraction), QUIET)


# -- mixing -----------------------------------------------------------------------------------------------------------


def test_a_part_of_two_folders_comes_from_both_and_from_the_seed(shards, others) -> None:
    """A shuffle that was thrown away took the first folder only (vllm-project/speculators#644)."""
    places = Corpus([Path(shards), Path(others)], (2, 4)).places
    orders = [epoch_order(places, epoch=0, seed=seed, weights=(0.2, 0.2)) for seed in (0, 0, 1)]
    assert [place.folder for place in sorted(orders[0], key=lambda place: place.folder)] == [0, 0, 1, 1]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != epoch_order(places, epoch=1, seed=0, weights=(0.2, 0.2))
    rows = training_rows(places, 100, seed=0, weights=(1.0, 1.0))
    assert {place.folder for _ in range(6) for place in next(rows).places} == {0, 1}


@pytest.mark.parametrize("weight", [-1.0, 0.0, math.nan, math.inf])
def test_a_weight_without_a_meaning_is_refused(weight: float, config) -> None:
    with pytest.raises(UsageError, match="`weights` are"):
        train(replace(config, weights=(weight,)), QUIET)


def test_weights_that_leave_no_sample_are_an_error_and_no_endless_search(config) -> None:
    with pytest.raises(DataError, match="take no sample of 10"):
        train(replace(config, weights=(0.01,)), QUIET)


# -- loading ----------------------------------------------------------------------------------------------------------


class Once:
    """Rows that can be read once, and whose length must not be asked for."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.reads = rows, 0

    def __iter__(self) -> Iterator[Row]:
        self.reads += 1
        assert self.reads == 1
        yield from self.rows

    def __len__(self) -> int:
        raise AssertionError("the length was asked for")


def some_rows(corpus: Corpus, count: int) -> list[Row]:
    rows = training_rows(corpus.places, 100, seed=0, weights=(1.0,))
    return [next(rows) for _ in range(count)]


def test_the_loader_reads_a_single_pass_of_rows_once_and_in_order(shards) -> None:
    corpus = Corpus([Path(shards)], (2, 4))
    rows = some_rows(corpus, 9)
    loaded = list(loaded_ahead(corpus, Once(rows), None))
    assert [item.row for item in loaded] == rows
    for item, row in zip(loaded, rows, strict=True):
        again = load_row(corpus, row, None).batch
        assert item.batch is not None and again is not None
        assert torch.equal(item.batch.aux, again.aux)


@pytest.mark.parametrize("error", [ShardError("cut"), KeyError("slot"), AssertionError("offsets"), MemoryError()])
def test_whatever_fails_while_reading_ahead_reaches_the_trainer(error: Exception, shards) -> None:
    """An error that the reading thread keeps to itself leaves the trainer waiting for ever."""
    corpus = Corpus([Path(shards)], (2, 4))

    def rows() -> Iterator[Row]:
        yield from some_rows(corpus, 2)
        raise error

    loaded = loaded_ahead(corpus, rows(), None)
    assert next(loaded).batch is not None
    assert next(loaded).batch is not None
    with pytest.raises(type(error)):
        next(loaded)
    assert not [thread for thread in threading.enumerate() if thread.name == "specctl-rows"]


def test_a_loader_that_is_closed_early_ends_its_thread(shards) -> None:
    corpus = Corpus([Path(shards)], (2, 4))
    loaded = loaded_ahead(corpus, training_rows(corpus.places, 100, seed=0, weights=(1.0,)), None)
    next(loaded)
    loaded.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "specctl-rows"]


# -- bad samples ------------------------------------------------------------------------------------------------------


def spoiled(folder: Path, values: dict[tuple[int, str], float]) -> str:
    """The folder with one value of each (sample, slot) replaced."""
    (path,) = (folder / "shards").glob("*.safetensors")
    entries, _ = read_header(path)
    offsets, data = read_array(entries["offsets"]), bytearray(path.read_bytes())
    for (sample, slot), value in values.items():
        entry = entries[f"hidden.{slot}"]
        at = entry.begin + int(offsets[sample]) * entry.nbytes // entry.shape[0]
        data[at : at + 4] = np.float32(value).tobytes()
    path.write_bytes(data)
    return str(folder)


@pytest.mark.parametrize("kind", [lambda c: c, parallel], ids=["eagle3", "peagle"])
def test_samples_with_nan_or_infinity_in_any_slot_are_left_out_and_counted(kind, config, copied) -> None:
    """One NaN of a server was trained on without a word (vllm-project/speculators#615)."""
    folder = spoiled(copied(), {(2, "2"): math.nan, (3, "norm"): math.inf})
    report = train(replace(kind(config), shards=(folder,), max_steps=None, epochs=1.0), QUIET)
    assert report is not None
    assert (report.bad_samples, report.samples) == (2, 10)
    assert math.isfinite(report.loss)
    entries, _ = read_header(Path(report.draft) / "model.safetensors")
    arrays = [read_array(entry) for entry in entries.values()]
    assert all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")


def test_a_bad_sample_that_is_held_out_spoils_no_score(config, copied) -> None:
    found = ready(replace(config, eval_fraction=0.4)).task
    (path,) = (Path(config.shards[0]) / "shards").glob("*.safetensors")
    begins = read_array(read_header(path)[0]["offsets"]).tolist()
    held = begins.index(found.held_out[0].begin)
    folder = spoiled(copied(), {(held, "4"): math.nan})
    report = train(replace(config, shards=(folder,), eval_fraction=0.4), QUIET)
    assert report is not None and report.evaluation is not None
    assert math.isfinite(report.evaluation.loss)


def test_samples_that_no_draft_can_be_scored_on_are_no_data(config, tiny, tmp_path) -> None:
    """A draft is first scored on the third token; without one the run would end as it began."""
    rows = [{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": [3, 4, 5, 6], "loss_mask": [1, 1, 0, 0]}]
    folder = extracted(tiny("llama"), rows, tmp_path / "short")
    for kind in (config, parallel(config)):
        with pytest.raises(DataError, match="from its third on"):
            train(replace(kind, shards=(folder,)), QUIET)
    mixed = extracted(tiny("llama"), [*rows, {"input_ids": [7, 8, 9], "loss_mask": [0, 0, 1]}], tmp_path / "mixed")
    report = train(replace(config, shards=(mixed,), max_steps=None, epochs=1.0), QUIET)
    assert report is not None and math.isfinite(report.loss)


# -- folders that do not fit ------------------------------------------------------------------------------------------


def test_layers_are_found_by_name_and_rise_whatever_order_they_are_stored_or_named_in(config, shards, others) -> None:
    """Layers told apart by place alone were accepted in any order."""
    one = Corpus([Path(others)], (2, 4))
    sample = one.sample(one.places[0])
    (path,) = (Path(others) / "shards").glob("*.safetensors")
    arrays, place = load_file(path), one.places[0]
    wanted = [arrays[f"hidden.{slot}"][place.begin : place.end] for slot in ("2", "4")]
    assert np.array_equal(sample.aux.numpy(), np.concatenate(wanted, -1))
    assert np.array_equal(sample.final.numpy(), arrays["hidden.norm"][place.begin : place.end])
    assert ready(replace(config, shards=(shards, others))).head.aux_ids == (2, 4, 8)
    assert ready(replace(config, layers="4,2")).head.aux_ids == (2, 4)


def test_every_folder_needs_the_layers_and_the_final_state(config, shards, tiny, tmp_path) -> None:
    """Without the last layer another one played the target's final state (vllm-project/speculators#705)."""
    fewer = extracted(tiny("llama"), chat_rows(2), tmp_path / "fewer", layers="2,4,norm")
    with pytest.raises(ShardError, match=r"no slot `8`; they have 2, 4, norm") as found:
        ready(replace(config, shards=(shards, fewer)))
    assert found.value.where == fewer
    assert ready(replace(config, shards=(fewer, shards))).head.aux_ids == (2, 4)


def other_weights(config: TrainConfig, folder: Path) -> Path:
    target = a_copy(config.target, folder)
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_shards_of_two_targets_are_not_mixed(config, shards, tmp_path) -> None:
    target = other_weights(config, tmp_path / "target")
    strange = extracted(str(target), chat_rows(2), tmp_path / "strange")
    with pytest.raises(ShardError, match="differ in `target_weights`") as found:
        ready(replace(config, shards=(shards, strange)))
    assert found.value.where == strange


def test_another_target_of_the_same_sizes_is_no_teacher(config, tmp_path) -> None:
    """Its head would say what the stored states never meant, and the loss would still fall."""
    with pytest.raises(UsageError, match="not those that the states were made with"):
        ready(replace(config, target=str(other_weights(config, tmp_path / "target"))))


def test_states_of_another_length_than_the_tokens_are_refused(config, copied) -> None:
    """speculators 0.9.0 fills the rows that are missing with zeros."""
    folder = copied()
    (path,) = (folder / "shards").glob("*.safetensors")
    _, info = read_header(path)
    arrays = load_file(path)
    arrays["hidden.4"] = arrays["hidden.4"][:-5]
    save_file(arrays, path, metadata=info)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = path.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ShardError, match=r"`hidden.4` is"):
        ready(replace(config, shards=(str(folder),)))


def cut_shard(folder: Path) -> None:
    (path,) = (folder / "shards").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-500])


def gone_shard(folder: Path) -> None:
    (path,) = (folder / "shards").glob("*.safetensors")
    path.unlink()


def unfinished(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "is_complete": False}))


@pytest.mark.parametrize(
    ("spoil", "message"), [(cut_shard, "were written"), (gone_shard, "is missing"), (unfinished, "is unfinished")]
)
def test_a_folder_that_is_not_whole_is_refused_before_training(spoil, message: str, config, copied) -> None:
    folder = copied()
    spoil(folder)
    with pytest.raises(ShardError, match=message) as found:
        train(replace(config, shards=(str(folder),)), QUIET)
    assert str(folder) in str(found.value.where)


def test_parquet_gives_the_batches_of_safetensors(config, shards, tiny, tmp_path) -> None:
    other = extracted(tiny("llama"), chat_rows(10), tmp_path / "p", format="parquet", compression="zstd")
    one, two = (Corpus([Path(folder)], (2, 4)) for folder in (shards, other))
    for left, right in zip(one.places, two.places, strict=True):
        first, second = one.sample(left), two.sample(right)
        assert left.sample_id == right.sample_id
        assert torch.equal(first.input_ids, second.input_ids)
        assert torch.equal(first.loss_mask, second.loss_mask)
        assert torch.equal(first.aux, second.aux)
        assert torch.equal(first.final, second.final)


def test_what_will_hardly_be_meant_is_said_and_trained_all_the_same(config) -> None:
    ready = prepare(config, torch.device("cpu"))
    assert doubts(ready, config) == []
    small = replace(config, draft_vocab_size=8, eval_fraction=0.02)
    few, narrow = doubts(prepare(small, torch.device("cpu")), small)
    assert "samples are held out" in few and "--eval-fraction" in few
    assert "a draft vocabulary of 8 tokens holds" in narrow and "--draft-vocab-size" in narrow
    no_score = replace(config, eval_fraction=0.0)
    assert doubts(prepare(no_score, torch.device("cpu")), no_score) == []

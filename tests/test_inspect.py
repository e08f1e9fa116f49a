"""`inspect`: its numbers against numpy, its text against the data, its comparison against the bytes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_verify import rewrite, states_of

from specctl.cli.app import run
from specctl.core import folder as folders
from specctl.errors import InputError
from specctl.recipes.extract import ExtractConfig, extract
from specctl.recipes.inspect import FolderReport, TargetReport, compare, inspect
from specctl.records.progress import SilentReporter

ROWS = (("hi", "hello there"), ("and?", "so it goes on"), ("why", "no"), ("the tide", "is out at noon"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four chats."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(len(ROWS))))
    return str(path)


def row(index: int) -> dict[str, object]:
    ask, answer = ROWS[index]
    turns = [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
    return {"id": f"s{index}", "messages": turns}


@pytest.fixture(scope="module")
def made(data: str, tiny: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder extracted with the given options, each made once."""
    done: dict[tuple[tuple[str, object], ...], Path] = {}

    def make(*more: str, **options: object) -> Path:
        key = (*((m, "") for m in more), *sorted(options.items()))
        if key not in done:
            out = tmp_path_factory.mktemp("made") / "states"
            given = {"layers": "0,4,norm", "dtype": "float32", **options}
            extract(ExtractConfig(tiny("llama"), (data, *more), str(out), **given), SilentReporter())
            done[key] = out
        return done[key]

    return make


def looked_at(path: Path, sample: int = 0) -> FolderReport:
    report = inspect(str(path), SilentReporter(), sample=sample)
    assert isinstance(report, FolderReport)
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_numbers_are_those_of_numpy(made: Callable[..., Path], dtype: str) -> None:
    folder = made(dtype=dtype)
    report = looked_at(folder)
    for stats in report.stats:
        raw = states_of(folder)[stats.slot]
        wide = (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else raw
        values = wide.astype(np.float64)
        assert stats.mean_norm == pytest.approx(np.sqrt((values**2).sum(1)).mean(), rel=1e-12)
        assert stats.rms == pytest.approx(np.sqrt((values**2).mean()), rel=1e-12)
        assert stats.max_abs == np.abs(values).max()
    assert [stats.slot for stats in report.stats] == ["0", "4", "norm"]


def test_the_counts_are_those_of_the_manifest(made: Callable[..., Path]) -> None:
    folder = made()
    report, manifest = looked_at(folder), folders.read_manifest(folder)
    assert (report.samples, report.tokens, report.supervised_tokens) == (
        manifest.counts["samples"],
        manifest.counts["tokens"],
        manifest.counts["supervised_tokens"],
    )
    assert report.bytes == sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert report.is_complete and report.drops == {}


@pytest.mark.parametrize("sample", range(4))
def test_the_rendered_sample_marks_exactly_the_supervised_text(made: Callable[..., Path], sample: int) -> None:
    view = looked_at(made(), sample).sample
    assert view is not None
    ask, answer = ROWS[int(view.sample_id[1:])]
    assert view.spans == (
        (f"<|im_start|>user\n{ask}<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
        ("\n", False),
    )
    assert view.supervised_tokens == len(answer) + 1


def test_a_sample_that_is_not_there_is_refused_with_the_range(made: Callable[..., Path]) -> None:
    for sample in (-1, 4):
        with pytest.raises(InputError, match=rf"there is no sample {sample}; the folder has 0\.\.3"):
            looked_at(made(), sample)


def test_a_folder_whose_target_is_gone_is_described_without_text(
    made: Callable[..., Path], tiny: Callable[[str], str], data: str, tmp_path: Path
) -> None:
    moved = tmp_path / "target"
    shutil.copytree(tiny("llama"), moved)
    extract(ExtractConfig(str(moved), (data,), str(tmp_path / "states"), layers="0"), SilentReporter())
    shutil.rmtree(moved)
    report = looked_at(tmp_path / "states")
    assert report.sample is None
    assert report.samples == 4
    rendered = inspect(str(tmp_path / "states"), SilentReporter(), target=tiny("llama"))
    assert isinstance(rendered, FolderReport) and rendered.sample is not None


def test_json_holds_the_report(made: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(made()), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["command"], told["ok"]) == ("inspect", True)
    assert told["report"]["samples"] == 4
    assert [stats["slot"] for stats in told["report"]["stats"]] == ["0", "4", "norm"]
    assert told["report"]["sample"]["spans"][1][1] is True


def test_plain_output_shows_the_supervised_text_in_marks(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(made()), "--sample", "0"]) == 0
    name = looked_at(made()).sample
    assert name is not None
    answer = ROWS[int(name.sample_id[1:])][1]
    out = capsys.readouterr().out
    assert f">>>{answer}<|im_end|><<<" in out
    assert "slot\tmean norm\trms\tmax abs" in out


def test_a_target_is_described_from_its_files(tiny: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    report = inspect(tiny("llama"), SilentReporter())
    assert isinstance(report, TargetReport)
    assert (report.num_layers, report.hidden_size, report.vocab_size) == (8, 32, 264)
    assert (report.aux, report.chat_template, report.bytes_per_token_per_slot) == ("2, 4, 5", "yes", 128)
    assert run(["inspect", tiny("llama"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"]["architecture"] == "LlamaForCausalLM"


def test_folders_of_either_container_and_any_order_compare_equal(
    made: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = made(), made(format="parquet", seed=5, batch_tokens=80, shard_mib=1)
    report = compare(str(one), str(other), SilentReporter())
    assert (report.samples, report.missing) == (4, 0)
    assert all(match.min_cosine > 1 - 1e-9 for match in report.slots)
    assert run(["inspect", str(one), "--compare", str(made(format="parquet"))]) == 0
    assert "4 samples in both: equal" in capsys.readouterr().out


def test_one_changed_number_makes_folders_different(
    made: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = Path(shutil.copytree(made(), tmp_path / "changed"))
    states = states_of(changed)
    states["4"][-1, 5] += 0.5
    rewrite(changed, states)
    report = compare(str(made()), str(changed), SilentReporter())
    assert not report.is_equal
    assert [match.is_equal for match in report.slots] == [True, False, True]
    assert report.slots[1].max_difference == pytest.approx(0.5, rel=1e-5)
    assert run(["inspect", str(made()), "--compare", str(changed), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["report"]["is_equal"]) == (False, False)


def test_states_that_only_rounding_tells_apart_are_the_same_on_request(
    made: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of two programs that ran the same target; a state of another size is no rounding, whatever its angle."""
    near, scaled = (Path(shutil.copytree(made(), tmp_path / name)) for name in ("near", "scaled"))
    for folder, factor in ((near, 1 + 1e-5), (scaled, 1.01)):
        states = states_of(folder)
        states["4"] *= np.float32(factor)
        rewrite(folder, states)
    assert run(["inspect", str(made()), "--compare", str(near)]) == 1
    assert "4 samples in both: equal but for rounding" in capsys.readouterr().out
    assert run(["inspect", str(made()), "--compare", str(near), "--rounding"]) == 0
    assert run(["inspect", str(made()), "--compare", str(scaled), "--rounding"]) == 1
    assert "4 samples in both: different" in capsys.readouterr().out
    assert run(["inspect", str(made()), "--rounding"]) == 2


def test_the_largest_difference_is_found_behind_a_worse_cosine(made: Callable[..., Path], tmp_path: Path) -> None:
    changed = Path(shutil.copytree(made(), tmp_path / "changed"))
    states = states_of(changed)
    states["4"][0] *= 100  # far off, in the same direction
    states["4"][-1, 0] += 0.5  # less far off, in another direction
    rewrite(changed, states)
    match = compare(str(made()), str(changed), SilentReporter()).slots[1]
    assert match.max_difference > 10
    assert match.min_cosine < 1 - 1e-6


def test_a_sample_in_one_folder_only_makes_them_different(made: Callable[..., Path], tmp_path: Path) -> None:
    more = tmp_path / "more.jsonl"
    more.write_text(json.dumps(row(0) | {"id": "extra"}) + "\n")
    report = compare(str(made()), str(made(str(more))), SilentReporter())
    assert (report.samples, report.missing, report.is_equal) == (4, 1, False)
    assert all(match.is_equal for match in report.slots)


@pytest.mark.parametrize(("key", "options"), [("slots", {"layers": "0,5,norm"}), ("dtype", {"dtype": "bfloat16"})])
def test_folders_of_other_slots_or_dtype_cannot_be_compared(
    made: Callable[..., Path], key: str, options: dict[str, object]
) -> None:
    with pytest.raises(InputError, match=f"cannot be compared: `{key}` is"):
        compare(str(made()), str(made(**options)), SilentReporter())


def test_a_folder_that_is_neither_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(tmp_path)]) == 2
    assert "neither `config.json` nor a GGUF file" in capsys.readouterr().err
    (tmp_path / "shards").mkdir()
    assert run(["inspect", str(tmp_path)]) == 2
    assert "`shards/` but no `manifest.json`" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "nothing" / "here")]) == 2
    assert "neither a folder nor a hub id" in capsys.readouterr().err

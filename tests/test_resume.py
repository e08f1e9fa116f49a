"""A run that is killed, refused, starved of disk or repeated: the folder stays whole and ends the same.

`python tests/test_resume.py` is a small server: it imports what a run needs once and forks a child
for each run asked for, so that a test can kill real processes without waiting for imports.
"""

import errno
import fcntl
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
import torch
from conftest import ROOT, WORDS, chat_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from talk import Talk

from fixtures.make import make_tiny
from specctl import plugins
from specctl.cli.app import run
from specctl.core import folder as folders
from specctl.core.answers import open_answers
from specctl.core.shardfile import Background
from specctl.errors import (
    DataError,
    InputError,
    InterruptedRun,
    MachineError,
    SettingsChangedError,
    ShardError,
    SpecctlError,
)
from specctl.files import durable
from specctl.recipes.extract import ExtractConfig, ExtractReport, extract
from specctl.recipes.verify import VerifyConfig, verify
from specctl.records.progress import SilentReporter

FORMATS = ("safetensors", "parquet")
LAYERS = "all,norm"  # 1280 bytes a token in fp32: 819 tokens fill a shard of 1 MiB

Make = Callable[..., ExtractReport]
Tree = dict[str, bytes]


def serve() -> None:
    """Fork a child for each line of stdin; tell its process id, and when it has ended, how."""
    torch.set_num_threads(1)
    make_tiny("llama")
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    from specctl.core import chat, counts, extraction, split  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(asked)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitpid(child, 0)[1]}\n")
        sys.stdout.flush()


def _child(asked: dict[str, Any]) -> None:
    config = asked["config"] | {"data": tuple(asked["config"]["data"]), "role_map": ()}
    code = 70
    try:
        if asked["largest_file"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["largest_file"], asked["largest_file"]))
        extract(ExtractConfig(**config), SilentReporter())
        code = 0
    except SpecctlError as error:
        Path(f"{config['out']}.error").write_text(f"{type(error).__name__}: {error.message}\n{error.hint}")
        code = error.exit_code
    finally:
        os._exit(code)


class Forks:
    """The server, seen from a test."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        )

    def start(self, config: ExtractConfig, *, largest_file: int = 0) -> int:
        """The process id of a run that has begun."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps({"config": asdict(config), "largest_file": largest_file}) + "\n")
        self._server.stdin.flush()
        return int(self._line())

    def wait(self) -> int:
        """How the run ended: its exit code, or minus the signal's number."""
        return os.waitstatus_to_exitcode(int(self._line()))

    def _line(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline()

    def close(self) -> None:
        self._server.communicate()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    server = Forks()
    yield server
    server.close()


@pytest.fixture
def config(tiny: Callable[[str], str], chats: Callable[..., str], tmp_path: Path) -> Callable[..., ExtractConfig]:
    """The configuration of a run of many small shards into `tmp_path / out`."""

    def build(out: str = "out", *, data: tuple[str, ...] | None = None, **options: Any) -> ExtractConfig:
        given = {"layers": LAYERS, "dtype": "float32", "shard_mib": 1, "batch_tokens": 128, **options}
        target = given.pop("target", None) or tiny("llama")
        return ExtractConfig(target, data or (chats(),), str(tmp_path / out), **given)

    return build


@pytest.fixture
def make(config: Callable[..., ExtractConfig]) -> Make:
    """Run an extraction in this process."""

    def run_it(out: str = "out", **options: Any) -> ExtractReport:
        report = extract(config(out, **options), SilentReporter())
        assert report is not None
        return report

    return run_it


def tree(folder: Path) -> Tree:
    """Every file of a folder, hidden ones too: name and bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def shards(folder: Path) -> list[Path]:
    """The visible shards, in order."""
    return sorted((folder / "shards").glob("[!.]*"))


def leftovers(folder: Path) -> list[str]:
    """What a run must not leave behind."""
    hidden = [p for p in folder.rglob(".*") if p != folder / ".lock"]
    return sorted(str(p.relative_to(folder)) for p in hidden)


def held(folder: Path) -> Counter[tuple[str, bytes]]:
    """(id, tokens) of every stored sample, with how often it is stored."""
    manifest = folders.read_manifest(folder)
    found: Counter[tuple[str, bytes]] = Counter()
    for entry in manifest.shards:
        if entry.rows:
            shard = plugins.load_store(manifest.settings["format"]).open_shard(folder / "shards" / entry.file, entry)
            offsets, ids = shard.offsets(), shard.input_ids()
            for i, name in enumerate(shard.sample_ids):
                found[name, ids[offsets[i] : offsets[i + 1]].tobytes()] += 1
    return found


def ids(folder: Path) -> list[str]:
    return sorted(name for name, _tokens in held(folder).elements())


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(name: str | None, ask: str, answer: str) -> dict[str, Any]:
    row: dict[str, Any] = {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
    return row if name is None else row | {"id": name}


def is_proven(folder: Path) -> bool:
    return verify(VerifyConfig(str(folder)), SilentReporter()).ok


def open_all_that_is_visible(folder: Path, format: str) -> None:
    """Read a folder in the middle of things as somebody else's program would."""
    if format == "parquet":
        if shards(folder):
            ds.dataset(folder / "shards", format="parquet").to_table()
        return
    for path in shards(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping, only `keys`)
                file.get_tensor(name)


# Killed


@pytest.mark.parametrize("format", FORMATS)
def test_killed_at_random_moments_a_folder_ends_in_the_same_bytes(
    forks: Forks, config: Callable[..., ExtractConfig], chats: Callable[..., str], tmp_path: Path, format: str
) -> None:
    options: dict[str, Any] = {"format": format, "data": (chats(60),)}
    took = 0.0
    for _ in range(2):  # the first one also warms the disk up
        shutil.rmtree(tmp_path / "whole", ignore_errors=True)
        began = time.monotonic()
        forks.start(config("whole", **options))
        assert forks.wait() == 0
        took = time.monotonic() - began
    whole = tree(tmp_path / "whole")
    assert len(shards(tmp_path / "whole")) > 5
    rng = random.Random(11)
    killed, with_shards = 0, 0
    for turn in range(10):
        out = tmp_path / f"out{turn}"
        child = forks.start(config(out.name, **options))
        time.sleep(rng.random() * took)
        with suppress(ProcessLookupError):  # it may have been faster
            os.kill(child, signal.SIGKILL)
        killed += forks.wait() == -signal.SIGKILL
        open_all_that_is_visible(out, format)
        with_shards += bool(shards(out))
        forks.start(config(out.name, **options))
        assert forks.wait() == 0
        assert tree(out) == whole
    assert killed >= 4
    assert with_shards >= 2


@pytest.mark.parametrize("format", FORMATS)
def test_killed_again_and_again_one_folder_ends_in_the_same_bytes(
    forks: Forks,
    config: Callable[..., ExtractConfig],
    make: Make,
    chats: Callable[..., str],
    tmp_path: Path,
    format: str,
) -> None:
    """Each run is killed as soon as it has added a shard or two."""
    options: dict[str, Any] = {"format": format, "data": (chats(60),)}
    make("whole", **options)
    out, rng = tmp_path / "out", random.Random(4)
    endings = []
    while not endings or endings[-1] != 0:
        before = len(shards(out))
        child = forks.start(config(**options))
        until = time.monotonic() + 20
        while len(shards(out)) < before + rng.randint(1, 2) and time.monotonic() < until:
            time.sleep(0.002)
            if (out / "manifest.json").exists() and folders.read_manifest(out).is_complete:
                break
        else:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        endings.append(forks.wait())
        open_all_that_is_visible(out, format)
    assert endings.count(-signal.SIGKILL) >= 3
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_real_processes_killed_at_20_random_moments_end_in_the_same_bytes(
    forks: Forks, config: Callable[..., ExtractConfig], chats: Callable[..., str], tmp_path: Path, format: str
) -> None:
    asked = config("whole", format=format, data=(chats(600),))
    arguments = command(asked, tmp_path)
    began = time.monotonic()
    subprocess.run([*arguments, "--out", asked.out], check=True, capture_output=True, cwd=ROOT)
    took = time.monotonic() - began
    rng = random.Random(17)
    killed = 0
    for turn in range(20):
        out = tmp_path / f"out{turn}"
        process = subprocess.Popen([*arguments, "--out", str(out)], stderr=subprocess.DEVNULL, cwd=ROOT)
        time.sleep(rng.random() * took)
        process.kill()
        killed += process.wait() == -signal.SIGKILL
        open_all_that_is_visible(out, format)
        forks.start(config(out.name, format=format, data=asked.data))
        assert forks.wait() == 0
        assert tree(out) == tree(tmp_path / "whole")
        shutil.rmtree(out)
    assert killed >= 10


def command(asked: ExtractConfig, tmp_path: Path) -> list[str]:
    """The command line of a run, without `--out`."""
    toml = tmp_path / "run.toml"
    toml.write_text(f"shard_mib = {asked.shard_mib}\n")
    options = {"layers": asked.layers, "dtype": asked.dtype, "format": asked.format}
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    batch = ["--batch-tokens", str(asked.batch_tokens), "--config", str(toml)]
    return [sys.executable, "-m", "specctl", "extract", asked.target, *asked.data, *flags, *batch]


def test_ctrl_c_exits_130_with_a_hint_and_the_rerun_completes(
    config: Callable[..., ExtractConfig], make: Make, chats: Callable[..., str], tmp_path: Path
) -> None:
    asked = config(data=(chats(300),))
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*command(asked, tmp_path), "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    until = time.monotonic() + 60
    while not (out / "shards").is_dir() or len(shards(out)) < 2:
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    told, said = process.communicate(timeout=60)
    assert process.returncode == InterruptedRun.exit_code == 130
    assert told == ""
    assert "error: interrupted with " in said
    assert "hint: run the same command again to continue" in said
    assert leftovers(out) == []
    assert not folders.read_manifest(out).is_complete
    assert len(folders.read_manifest(out).shards) == len(shards(out)) >= 2
    make(data=asked.data)
    make("whole", data=asked.data)
    assert tree(out) == tree(tmp_path / "whole")


def test_an_interrupted_wait_for_the_writer_can_be_taken_up_again() -> None:
    """A `Thread.join` that Ctrl-C interrupts takes the thread for ended in Python 3.11 and 3.12: the run
    would leave a shard that is in place and not listed, or a half-written one."""
    done: list[object] = []

    def finish(job: object) -> None:
        time.sleep(0.5)
        done.append(job)

    background = Background(finish)
    background.submit("shard")  # type: ignore[arg-type]  # anything can be finished
    threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    assert done == []
    background.wait()
    assert done == ["shard"]


# The disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system takes root")
    mounted: list[Path] = []

    def mount(size_kib: int) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(path)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # an error that was caught may map its files


class Filler(SilentReporter):
    """Fills the disk once a first shard is there."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.filler = disk, disk / "filler"

    def advance(self, amount: int) -> None:
        if self.filler.exists() or not list(self.disk.glob("*/shards/[!.]*")):
            return
        with self.filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))


def test_a_disk_that_is_too_small_is_refused_with_needed_and_free_bytes(
    config: Callable[..., ExtractConfig],
    chats: Callable[..., str],
    small_disk: Callable[[int], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    disk = small_disk(1024)
    asked = config("disk/out", data=(chats(30),))
    with pytest.raises(MachineError, match=r"[\d,]+ bytes are needed and [\d,]+ bytes are free"):
        extract(asked, SilentReporter())
    assert leftovers(disk / "out") == []
    assert (
        run(["extract", asked.target, *asked.data, "--out", asked.out, "--layers", "all,norm", "--dtype", "float32"])
        == 2
    )
    assert "error: the disk is too small: " in capsys.readouterr().err


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_fills_up_keeps_finished_shards_and_the_run_continues(
    config: Callable[..., ExtractConfig],
    make: Make,
    chats: Callable[..., str],
    small_disk: Callable[[int], Path],
    tmp_path: Path,
    format: str,
) -> None:
    disk = small_disk(32 * 1024)
    options: dict[str, Any] = {"format": format, "data": (chats(100),)}
    filler = Filler(disk)
    with pytest.raises(MachineError, match=r"the disk is full: .*bytes are free") as caught:
        extract(config("disk/out", **options), filler)
    assert "run the same command again to continue" in str(caught.value.hint)
    assert leftovers(disk / "out") == []
    kept = folders.read_manifest(disk / "out")
    assert [e.file for e in kept.shards] == [path.name for path in shards(disk / "out")]
    assert not kept.is_complete
    report = verify(VerifyConfig(str(disk / "out")), SilentReporter())
    assert len(report.faults) == 1 and "did not finish" in report.faults[0]
    filler.filler.unlink()
    make("disk/out", **options)
    make("whole", **options)
    assert tree(disk / "out") == tree(tmp_path / "whole")


def test_a_disk_without_room_for_the_manifest_is_a_machine_error(
    make: Make, small_disk: Callable[[int], Path], tmp_path: Path
) -> None:
    disk = small_disk(64)
    with (disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(MachineError, match="the disk is full"):
        make("disk/out")
    assert leftovers(disk / "out") == []


@pytest.mark.parametrize("format", FORMATS)
def test_a_write_that_fails_in_the_middle_of_a_shard_leaves_nothing_torn(
    forks: Forks,
    config: Callable[..., ExtractConfig],
    make: Make,
    chats: Callable[..., str],
    tmp_path: Path,
    format: str,
) -> None:
    """The limit on file sizes (RLIMIT_FSIZE) lets everything through but a shard's states."""
    options: dict[str, Any] = {"format": format, "data": (chats(30),)}
    out = tmp_path / "out"
    forks.start(config(**options), largest_file=300_000)
    assert forks.wait() == MachineError.exit_code
    assert (tmp_path / "out.error").read_text().startswith("MachineError: cannot write to the folder: ")
    assert shards(out) == [] and leftovers(out) == []
    make(**options)
    make("whole", **options)
    assert tree(out) == tree(tmp_path / "whole")


def test_a_read_only_folder_is_a_machine_error(make: Make, small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    disk = small_disk(32 * 1024)
    make("disk/out")
    before = tree(disk)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for out in ("disk/out", "disk/new"):
        with pytest.raises(MachineError, match="cannot write to the folder: Read-only file system"):
            make(out)
    assert tree(disk) == before
    assert is_proven(disk / "out")


def test_an_output_path_that_is_or_lies_below_a_file_is_a_machine_error(make: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below"):
        with pytest.raises(MachineError, match="cannot write to the folder") as caught:
            make(out)
        assert caught.value.where == str(tmp_path / out)
    assert (tmp_path / "file").read_text() == "mine"


def test_missing_parents_of_the_output_are_made(make: Make, tmp_path: Path) -> None:
    make("a/b/c")
    assert is_proven(tmp_path / "a/b/c")


# Damaged shards


@pytest.mark.parametrize("format", FORMATS)
def test_a_cut_shard_is_refused_and_once_deleted_it_alone_is_made_again(
    make: Make, chats: Callable[..., str], tmp_path: Path, format: str
) -> None:
    options: dict[str, Any] = {"format": format, "data": (chats(60),)}
    make(**options)
    out = tmp_path / "out"
    whole = tree(out)
    cut = shards(out)[1]
    cut.write_bytes(whole[f"shards/{cut.name}"][:-16])
    before = tree(out)
    with pytest.raises(ShardError, match=r"bytes were written|were written") as caught:
        make(**options)
    assert caught.value.where == str(cut) and "delete this file" in str(caught.value.hint)
    assert tree(out) == before
    cut.unlink()
    stamps = {path.name: path.stat().st_mtime_ns for path in shards(out)}
    tokens = next(e.tokens for e in folders.read_manifest(out).shards if e.file == cut.name)
    assert make(**options).new_tokens == tokens
    assert tree(out) == whole
    assert {p.name: p.stat().st_mtime_ns for p in shards(out) if p != cut} == stamps


def test_a_deleted_shard_is_made_up_for_when_the_data_has_grown(
    make: Make, chats: Callable[..., str], tmp_path: Path
) -> None:
    """The samples of the hole are planned anew; the manifest must not list the missing file again."""
    first = chats(40)
    make(data=(first,))
    out = tmp_path / "out"
    shards(out)[1].unlink()
    make(data=(first, chats(10, seed=1, name="more.jsonl")))
    assert is_proven(out)
    assert ids(out) == sorted(row["id"] for row in chat_rows(40) + chat_rows(10, 1))


def test_while_a_finished_folder_is_continued_it_says_that_it_is_not_complete(
    forks: Forks, config: Callable[..., ExtractConfig], make: Make, chats: Callable[..., str], tmp_path: Path
) -> None:
    first = chats(20)
    make(data=(first,))
    assert folders.read_manifest(tmp_path / "out").is_complete
    before = len(shards(tmp_path / "out"))
    child = forks.start(config(data=(first, chats(200, seed=1, name="more.jsonl"))))
    until = time.monotonic() + 20
    while len(folders.read_manifest(tmp_path / "out").shards) == before:
        assert time.monotonic() < until
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    assert forks.wait() == -signal.SIGKILL
    assert not folders.read_manifest(tmp_path / "out").is_complete


# Settings


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"max_length": 50}, ["max_length"]),
        ({"dtype": "bfloat16"}, ["dtype"]),
        ({"layers": "0,norm"}, ["final_norm_applied", "slots"]),
        ({"chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"}, ["chat_template"]),
        ({"format": "parquet"}, ["compression", "format"]),
        ({"format": "parquet", "compression": "none", "max_length": 50}, ["format", "max_length"]),
    ],
    ids=["max_length", "dtype", "layers", "template", "format", "two"],
)
def test_a_changed_setting_is_refused_and_listed(
    make: Make, tmp_path: Path, changed: dict[str, Any], keys: list[str]
) -> None:
    make()
    before = tree(tmp_path / "out")
    with pytest.raises(SettingsChangedError) as caught:
        make(**changed)
    listed = caught.value.message.removeprefix("the folder was made with other settings: ").split("; ")
    assert [line.partition(": ")[0] for line in listed] == keys
    assert all(" -> " in line for line in listed)
    assert "--overwrite" in str(caught.value.hint)
    assert tree(tmp_path / "out") == before


def test_other_weights_of_the_same_shape_are_refused(make: Make, tmp_path: Path) -> None:
    make()
    other = make_tiny("llama", tmp_path / "other", seed=1)
    with pytest.raises(SettingsChangedError, match="other settings: target_weights: ") as caught:
        make(target=str(other))
    assert "; " not in caught.value.message


def test_a_target_that_moved_is_the_same_target(make: Make, tiny: Callable[[str], str], tmp_path: Path) -> None:
    make()
    before = tree(tmp_path / "out")
    moved = shutil.copytree(tiny("llama"), tmp_path / "moved")
    assert make(target=str(moved)).new_tokens == 0
    assert tree(tmp_path / "out") == before


@pytest.mark.parametrize("format", FORMATS)
def test_changed_seed_limit_order_and_data_add_what_is_missing_and_nothing_twice(
    make: Make, tmp_path: Path, format: str
) -> None:
    rows = chat_rows(40)
    data = write_rows(tmp_path / "a.jsonl", rows)
    backwards = write_rows(tmp_path / "b.jsonl", rows[::-1])
    more = write_rows(tmp_path / "c.jsonl", chat_rows(25, seed=1))
    out = tmp_path / "out"
    make(data=(data,), limit=10, format=format)
    first = ids(out)
    assert len(first) == 10
    make(data=(data,), limit=10, seed=1, format=format)
    assert len(set(ids(out))) == len(ids(out)) > 10 and set(first) <= set(ids(out))
    make(data=(data,), limit=30, format=format)
    assert len(set(ids(out))) == len(ids(out)) >= 30
    make(data=(backwards,), format=format)
    assert ids(out) == sorted(row["id"] for row in rows)
    assert make(data=(backwards,), seed=9, format=format).new_tokens == 0
    assert make(data=(data,), limit=3, format=format).new_tokens == 0
    make(data=(more, backwards), format=format)
    assert ids(out) == sorted(row["id"] for row in rows + chat_rows(25, seed=1))
    assert is_proven(out)


def test_a_changed_shard_size_moves_nothing(make: Make, chats: Callable[..., str], tmp_path: Path) -> None:
    data = (chats(40),)
    make(data=data)
    before = tree(tmp_path / "out")
    assert make(data=data, shard_mib=2).new_tokens == 0
    assert tree(tmp_path / "out") == before


def test_only_another_time_of_change_leaves_nothing_to_do(
    make: Make, chats: Callable[..., str], tiny: Callable[[str], str], tmp_path: Path
) -> None:
    """Source: what is identified by its content does not change when a file is copied or touched."""
    target = Path(shutil.copytree(tiny("llama"), tmp_path / "target"))
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}")
    options: dict[str, Any] = {"data": (chats(),), "target": str(target), "chat_template": str(template)}
    make(**options)
    before = tree(tmp_path / "out")
    stamps = [path.stat().st_mtime_ns for path in shards(tmp_path / "out")]
    for path in (template, Path(options["data"][0]), *target.iterdir()):
        os.utime(path, (1, 1))
    assert make(**options).new_tokens == 0
    assert tree(tmp_path / "out") == before
    assert [path.stat().st_mtime_ns for path in shards(tmp_path / "out")] == stamps


# Whose folder


STRANGERS: dict[str, dict[str, str]] = {
    "a file": {"notes.txt": "mine"},
    "a hidden file": {".gitignore": "*"},
    "shards of another tool": {"shards/00000.bin": "mine", "shards/.index": "mine"},
    "a manifest of another tool": {"manifest.json": '{"name": "app"}', "shards/00000.bin": "mine", "a.tmp": "x"},
    "a manifest that is no JSON": {"manifest.json": "mine", ".x.tmp": "mine"},
    "a lock and a file": {".lock": "mine", "notes.txt": "mine"},
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_strangers_folder_is_refused_and_untouched(make: Make, tmp_path: Path, kind: str, overwrite: bool) -> None:
    out = tmp_path / "out"
    for name, text in STRANGERS[kind].items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    before = tree(out)
    with pytest.raises(ShardError) as caught:
        make(overwrite=overwrite)
    assert caught.value.where == str(out) and "empty or new folder" in str(caught.value.hint)
    assert tree(out) == before


def test_overwriting_leaves_no_shard_of_the_longer_run(make: Make, chats: Callable[..., str], tmp_path: Path) -> None:
    make(data=(chats(60),))
    assert len(shards(tmp_path / "out")) > 3
    make(overwrite=True, dtype="bfloat16", data=(chats(5),))
    make("fresh", dtype="bfloat16", data=(chats(5),))
    assert len(shards(tmp_path / "out")) == 1
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_two_runs_at_once_on_one_folder_are_refused(
    forks: Forks, config: Callable[..., ExtractConfig], make: Make, chats: Callable[..., str], tmp_path: Path
) -> None:
    data = (chats(200),)
    child = forks.start(config(data=data))
    until = time.monotonic() + 20
    while not (tmp_path / "out" / "manifest.json").exists():
        assert time.monotonic() < until
        time.sleep(0.002)
    os.kill(child, signal.SIGSTOP)
    before = tree(tmp_path / "out")
    try:
        for overwrite in (False, True):
            with pytest.raises(MachineError, match="another run is writing this folder"):
                make(data=data, overwrite=overwrite)
        assert tree(tmp_path / "out") == before
    finally:
        os.kill(child, signal.SIGCONT)
    assert forks.wait() == 0
    assert is_proven(tmp_path / "out")


# File systems that lack something


def without_locks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As Lustre mounted without `flock`, and some NFS: only the system call is another."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said_and_written_to(
    config: Callable[..., ExtractConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    without_locks(monkeypatch, code)
    heard = Talk()
    assert extract(config(), heard) is not None
    assert folders.NO_LOCKS in heard.notes
    with open_answers(tmp_path / "answers.jsonl", {}, overwrite=False) as answers:
        assert answers.rows == {}


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_process_holds_is_never_taken_for_a_missing_one(
    config: Callable[..., ExtractConfig], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    without_locks(monkeypatch, code)
    with pytest.raises(MachineError, match="another run is writing this folder"):
        extract(config(), SilentReporter())


def test_a_lock_is_one_processs_until_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold = "import sys; from specctl.files.durable import lock; f = open(sys.argv[1], 'a'); print(lock(f.fileno()))"
    child = subprocess.Popen(
        [sys.executable, "-c", hold + "; sys.stdout.flush(); sys.stdin.read()", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert child.stdout is not None and child.stdout.readline() == "True\n"
    with path.open("a") as file:
        with pytest.raises(BlockingIOError):
            durable.lock(file.fileno())
        child.kill()
        child.communicate()
        assert durable.lock(file.fileno())


def test_replicas_need_locks_to_share_a_manifest(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    without_locks(monkeypatch, errno.ENOSYS)
    entry = folders.read_manifest(tmp_path / "out").shards[0]
    with pytest.raises(MachineError, match="replicas share this folder by locks, and its file system has none"):
        folders.add_shard(tmp_path / "out", entry, [], is_shared=True)


def test_a_file_system_that_syncs_no_folders_is_written_to(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real, codes = os.fsync, [errno.EINVAL]

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(codes[0], os.strerror(codes[0]))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert make().samples == 12
    codes[0] = errno.EIO
    with pytest.raises(MachineError, match="Input/output error"):
        make("other")


# What DATA no longer has


@pytest.mark.parametrize("format", FORMATS)
def test_samples_that_data_no_longer_has_are_counted_in_a_warning(
    config: Callable[..., ExtractConfig], tmp_path: Path, format: str
) -> None:
    rows = [chat(f"c{i}", "hi", f"answer {i}") for i in range(5)]
    data = write_rows(tmp_path / "a.jsonl", rows)
    heard = Talk()
    extract(config(data=(data,), format=format), heard)
    extract(config(data=(data,), format=format), heard)
    assert heard.warnings == []
    write_rows(tmp_path / "a.jsonl", [chat("c0", "hi", "edited"), *rows[2:]])
    report = extract(config(data=(data,), format=format), heard)
    assert report is not None and report.samples == 6
    assert heard.warnings == [
        "samples of the folder that DATA does not have: 2 of 6, 1 of them under an id that DATA gives to another "
        "text; they stay in it, and `--overwrite` makes it of DATA alone"
    ]


def test_a_smaller_limit_says_both_totals(config: Callable[..., ExtractConfig]) -> None:
    heard = Talk()
    extract(config(), heard)
    extract(config(limit=3), heard)
    assert heard.warnings == []
    assert "the folder holds 12 samples; this command asked for 3" in heard.notes


def test_another_role_map_is_refused_and_an_older_folder_takes_any(make: Make, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yes"}]}
    row["messages"] += [{"role": "user", "content": "and"}, {"role": "assistant", "content": "no"}]
    data = (write_rows(tmp_path / "a.jsonl", [row]),)
    make(data=data, role_map=("bot=assistant",))
    with pytest.raises(SettingsChangedError, match=r"role_map: .*assistant.* -> .*user"):
        make(data=data, role_map=("bot=user",))
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["settings"]["role_map"]
    path.write_text(json.dumps(manifest))
    assert make(data=data, role_map=("bot=assistant",)).new_tokens == 0
    assert make(data=data, role_map=("bot=user",), overwrite=True).samples == 1
    assert folders.read_manifest(tmp_path / "out").settings["role_map"] == {"bot": "user"}


def test_a_run_that_could_not_read_its_data_is_corrected_in_the_same_folder(make: Make, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "narrator", "content": "yes"}]}
    data = (write_rows(tmp_path / "a.jsonl", [row]),)
    with pytest.raises(SpecctlError, match="narrator"):
        make(data=data)
    assert folders.read_manifest(tmp_path / "out").shards == ()
    assert make(data=data, role_map=("narrator=assistant",)).samples == 1
    assert folders.read_manifest(tmp_path / "out").settings["role_map"] == {"narrator": "assistant"}


# What is counted


def counted(folder: Path) -> tuple[int, int, dict[str, int]]:
    manifest = folders.read_manifest(folder)
    return manifest.counts["rows"], manifest.counts["samples"], dict(manifest.drops)


def test_every_row_is_a_sample_or_counted_as_dropped(make: Make, tmp_path: Path) -> None:
    rows = [
        chat("a", "hi", "hello"),
        chat("a", "hi", "hello"),  # the same again
        chat("a", "hi", "good day"),  # the same id, and another answer
        chat(None, "why", "no"),
        chat(None, "why", "no"),
        chat("q", "only asked", ""),
        {"id": "u", "messages": [{"role": "user", "content": "nobody answers"}]},
        {"nothing": 1},
    ]
    data = Path(write_rows(tmp_path / "rows.jsonl", rows))
    data.write_text(data.read_text() + "no json\n")
    report = make(data=(str(data),))
    total, samples, drops = counted(tmp_path / "out")
    assert total == report.rows == 9
    assert samples + sum(drops.values()) == total
    assert drops["duplicate"] == 2
    assert samples == sum(held(tmp_path / "out").values()) == 3
    assert [name for name in ids(tmp_path / "out") if name == "a"] == ["a", "a"]


def test_an_id_that_ends_in_nul_is_the_same_sample_when_read_back(make: Make, tmp_path: Path) -> None:
    """Shards pad ids with NUL; one that ended in it would be extracted again by every longer run."""
    rows = [chat("a\0", "hi", "hello"), chat("b", "hi", "good day")]
    make(data=(write_rows(tmp_path / "a.jsonl", rows),))
    make(data=(write_rows(tmp_path / "b.jsonl", [*rows, chat("c", "so", "yes")]),))
    assert ids(tmp_path / "out") == ["a", "b", "c"]


@pytest.mark.parametrize("format", FORMATS)
def test_token_counts_are_those_of_a_recount_by_hand(
    make: Make, chats: Callable[..., str], tmp_path: Path, format: str
) -> None:
    data = (chats(40),)
    make(data=data, limit=15, format=format)
    make(data=data, format=format)
    total: Counter[int] = Counter()
    supervised: Counter[int] = Counter()
    for row in chat_rows(40):
        ask, answer = (str(turn["content"]) for turn in row["messages"])  # type: ignore[attr-defined]
        prompt = [258, *b"user\n", *ask.encode(), 259, *b"\n", 258, *b"assistant\n"]
        written = [*answer.encode(), 259]
        total.update([*prompt, *written, *b"\n"])
        supervised.update(written)
    counts = load_file(tmp_path / "out" / "token_counts.safetensors")
    for name, by_hand in (("total", total), ("supervised", supervised)):
        assert counts[name].dtype is torch.int64 and len(counts[name]) == 264
        assert {i: n for i, n in enumerate(counts[name].tolist()) if n} == dict(by_hand)


# States that no file should hold


def spoiled(tmp_path: Path, tiny: Callable[[str], str], edit: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """A copy of the tiny Llama with edited weights."""
    folder = Path(shutil.copytree(tiny("llama"), tmp_path / "spoiled"))
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def overflow_at_q(weights: dict[str, torch.Tensor]) -> None:
    """The embedding of `Q` just fits float16; what the first layer's MLP adds to it passes 65504."""
    embedding = torch.zeros(32)
    embedding[31] = 60000.0
    weights["model.embed_tokens.weight"][ord("Q")] = embedding
    layer = "model.layers.0."
    normed = torch.zeros(32)
    normed[31] = 32**0.5 * weights[layer + "post_attention_layernorm.weight"][31]
    gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    active = torch.nn.functional.silu(gate @ normed) * (up @ normed)
    down[31] = 7000 * active / active.square().sum()


def nan_at_q(weights: dict[str, torch.Tensor]) -> None:
    weights["model.embed_tokens.weight"][ord("Q")] = torch.nan


def nan_everywhere(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.2.mlp.down_proj.weight"][:] = torch.nan


@pytest.fixture
def with_q(tmp_path: Path) -> str:
    """Three chats; `bad` has the letter whose embedding is spoiled."""
    rows = [chat("good", "hi", "hello"), chat("bad", "say", "Q and more"), chat("fine", "why", "no")]
    return write_rows(tmp_path / "q.jsonl", rows)


def test_a_float16_overflow_is_an_error_that_names_slot_and_sample(
    make: Make, tiny: Callable[[str], str], with_q: str, tmp_path: Path
) -> None:
    target = spoiled(tmp_path, tiny, overflow_at_q)
    with pytest.raises(
        InputError, match=r"float16 cannot hold the states of sample `bad`: .* first in slot 1"
    ) as caught:
        make(target=target, data=(with_q,), dtype="float16")
    assert "`--dtype bfloat16`" in str(caught.value.hint) and "`--allow-overflow`" in str(caught.value.hint)
    assert folders.read_manifest(tmp_path / "out").shards == ()
    assert shards(tmp_path / "out") == [] and leftovers(tmp_path / "out") == []


def test_allowed_overflow_drops_the_sample_and_counts_it(
    make: Make, tiny: Callable[[str], str], with_q: str, tmp_path: Path
) -> None:
    target = spoiled(tmp_path, tiny, overflow_at_q)
    with pytest.raises(InputError):
        make(target=target, data=(with_q,), dtype="float16")
    report = make(target=target, data=(with_q,), dtype="float16", allow_overflow=True)
    assert ids(tmp_path / "out") == ["fine", "good"]
    assert (report.rows, report.samples, report.drops) == (3, 2, {"non_finite": 1})
    dropped = folders.read_manifest(tmp_path / "out").dropped_samples
    assert [(drop.sample_id, drop.reason.endswith("first in slot 1")) for drop in dropped] == [("bad", True)]
    assert is_proven(tmp_path / "out")


def test_the_same_states_fit_bfloat16(make: Make, tiny: Callable[[str], str], with_q: str, tmp_path: Path) -> None:
    make(target=spoiled(tmp_path, tiny, overflow_at_q), data=(with_q,), dtype="bfloat16")
    assert ids(tmp_path / "out") == ["bad", "fine", "good"]


def test_the_samples_beside_a_dropped_one_keep_their_states(
    make: Make, tiny: Callable[[str], str], with_q: str, tmp_path: Path
) -> None:
    """Rows are cut out of the middle of a shard; the others must not move."""
    make("clean", data=(with_q,))
    make(target=spoiled(tmp_path, tiny, nan_at_q), data=(with_q,))
    clean, kept = states_by_id(tmp_path / "clean"), states_by_id(tmp_path / "out")
    assert set(kept) == {"good", "fine"}
    for name in kept:
        assert np.allclose(kept[name], clean[name], rtol=1e-5, atol=1e-5)


def states_by_id(folder: Path) -> dict[str, Any]:
    """All slots [T, L * D] of every sample."""
    found = {}
    manifest = folders.read_manifest(folder)
    for entry in manifest.shards:
        shard = plugins.load_store(manifest.settings["format"]).open_shard(folder / "shards" / entry.file)
        offsets = shard.offsets()
        states = np.concatenate([shard.slot(slot) for slot in manifest.slots], axis=1)
        for i, name in enumerate(shard.sample_ids):
            found[name] = states[offsets[i] : offsets[i + 1]]
    return found


def test_dropped_samples_are_counted_once_when_the_data_grows(
    make: Make, tiny: Callable[[str], str], with_q: str, tmp_path: Path
) -> None:
    target = spoiled(tmp_path, tiny, nan_at_q)
    make(target=target, data=(with_q,))
    more = write_rows(tmp_path / "more.jsonl", [chat("also bad", "so", "Q"), chat("new", "so", "yes")])
    make(target=target, data=(with_q, more))
    assert ids(tmp_path / "out") == ["fine", "good", "new"]
    assert counted(tmp_path / "out") == (5, 3, {"non_finite": 2})
    assert make(target=target, data=(more, with_q)).new_tokens == 0


def test_a_shard_whose_samples_are_all_dropped_is_not_tried_again(
    make: Make, tiny: Callable[[str], str], tmp_path: Path
) -> None:
    target = spoiled(tmp_path, tiny, nan_at_q)
    rows = [chat(f"bad{i}", "Q " + " ".join(WORDS), "yes " * 30) for i in range(8)]
    data = write_rows(tmp_path / "rows.jsonl", [*rows, chat("good", "hi", "hello")])
    make(target=target, data=(data,))
    listed = folders.read_manifest(tmp_path / "out").shards
    assert any(entry.rows == 0 for entry in listed)
    assert ids(tmp_path / "out") == ["good"]
    before = tree(tmp_path / "out")
    assert make(target=target, data=(data,)).new_tokens == 0
    assert tree(tmp_path / "out") == before
    assert is_proven(tmp_path / "out")


def test_nothing_but_nan_is_an_error(make: Make, tiny: Callable[[str], str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all samples were dropped: .* non-finite values, first in slot 3"):
        make(target=spoiled(tmp_path, tiny, nan_everywhere))
    assert shards(tmp_path / "out") == []
    assert not folders.read_manifest(tmp_path / "out").is_complete


if __name__ == "__main__":
    serve()

"""`specctl check-ckpt` and `convert` on hostile drafts: what they cost, open, run and print."""

import contextlib
import io
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BROKEN, HEADERS, HEALTHY, TARGET, checked, copy_of, materialise, mutate, rules_broken
from conftest import ROOT

from fixtures import broken as fixtures
from specctl import plugins
from specctl.cli.app import run
from specctl.cli.check_ckpt import check_ckpt
from specctl.cli.convert import convert
from specctl.cli.output import show_error, show_json, show_lines, show_pairs, show_table
from specctl.errors import ContractError, SpecctlError, UsageError
from specctl.files.checkpoint import open_checkpoint
from specctl.files.tensors import Table
from specctl.recipes.check import check, parse_version
from specctl.recipes.repair import check_and_fix
from specctl.records.check import CheckConfig
from specctl.records.progress import SilentReporter


def test_a_5_gb_head_costs_0_3_s_of_cpu_beyond_start_up_and_300_mb(tmp_path: Path) -> None:
    header = json.loads((HEADERS / "vllm-llama3.1-8b.json").read_text())
    width, inner = 16384, 53248
    config = header["config"] | {
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": 128,
    }
    shapes = {
        "q_proj": [width, 2 * width],
        "k_proj": [1024, 2 * width],
        "v_proj": [1024, 2 * width],
        "o_proj": [width, width],
    }
    tensors = {f"midlayer.self_attn.{name}.weight": ["BF16", shape] for name, shape in shapes.items()}
    tensors |= {f"midlayer.mlp.{name}_proj.weight": ["BF16", [inner, width]] for name in ("gate", "up")}
    tensors |= {
        f"midlayer.{name}.weight": ["BF16", [width]]
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    tensors |= {
        "midlayer.mlp.down_proj.weight": ["BF16", [width, inner]],
        "fc.weight": ["BF16", [width, 3 * width]],
        "norm.weight": ["BF16", [width]],
        "lm_head.weight": ["BF16", [32000, width]],
        "d2t": ["I64", [32000]],
        "t2d": ["BOOL", [128256]],
    }
    (tmp_path / "big.json").write_text(json.dumps(header | {"config": config, "tensors": tensors}))
    materialise(tmp_path / "big.json", tmp_path / "big")
    assert (tmp_path / "big" / "model.safetensors").stat().st_size > 5e9
    start, _ = cost("--version")
    seconds, megabytes = cost("check-ckpt", str(tmp_path / "big"))
    assert seconds - start <= 0.3
    assert megabytes <= 300


def cost(*arguments: str) -> tuple[float, float]:
    """CPU seconds, best of six, and the largest memory in MB of a run."""
    best = float("inf")
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "specctl", *arguments], capture_output=True, cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    code = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, '-m', 'specctl', *sys.argv[1:]], "
        "capture_output=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=True
    )
    return best, float(shown.stdout)


def test_neither_a_check_nor_a_deep_one_imports_torch() -> None:
    code = (
        "import sys; from specctl.cli.app import run; "
        f"run(['check-ckpt', {str(HEALTHY / 'eagle3')!r}, '--target', {str(TARGET)!r}, '--deep']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pyarrow')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0


WATCH: dict[str, object] = {"on": False, "events": []}


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if WATCH["on"] and event in (
        "open",
        "os.system",
        "subprocess.Popen",
        "pickle.find_class",
        "os.exec",
        "socket.connect",
    ):
        WATCH["events"].append((event, str(arguments[0]) if arguments else ""))  # type: ignore[attr-defined]


sys.addaudithook(_audit)


def sources(tmp_path: Path) -> list[Path]:
    """What is mutated: healthy, sharded, pickled and other layouts."""
    names = ["WEIGHTS_STRAY", "WEIGHTS_PICKLE", "TENSOR_TWICE", "NORM_RESIDUAL_IMPLICIT", "NORMS_SPECULATORS_PEAGLE"]
    names += ["NAME_PREFIX", "D2T_ABSOLUTE", "ROPE_MROPE", "AUX_LAYERS_UNSORTED"]
    folders = [HEALTHY / "eagle3", HEALTHY / "peagle", *(BROKEN / name / "draft" for name in names)]
    made = fixtures.draft(num_hidden_layers=3, attention_bias=True, mlp_bias=True, fc_norm=True, parallel=True)
    fixtures.save(made, tmp_path / "deep")
    return [*folders, tmp_path / "deep"]


def test_2000_mutated_checkpoints_end_in_a_report_or_one_of_our_errors(tmp_path: Path) -> None:
    drafts = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in sources(tmp_path)]
    rng = random.Random(2025)
    target = copy_of(TARGET, tmp_path / "target")
    outcomes: Counter[tuple[str, object]] = Counter()
    before = resident_mb("VmRSS")
    reset_peak()
    for number in range(2000):
        draft = laid(rng.choice(drafts), tmp_path / "mutant")
        is_whole = number % 10 >= 7  # what no reader takes in would never be repaired or converted
        done = [mutate(draft, rng, keeps_form=is_whole) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        WATCH.update(on=True, events=[])
        began = time.monotonic()
        try:
            outcomes[tried(draft, target, number, rng)] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number}: {done}") from error
        finally:
            WATCH["on"] = False
        assert time.monotonic() - began < 5, (number, done)
        outside = [e for e in WATCH["events"] if e[0] != "open" or is_foreign(e[1], tmp_path)]  # type: ignore[attr-defined]
        assert not outside, (number, done, outside)
        left = {path.name for path in tmp_path.iterdir()} - {"mutant", "target", "deep"}
        assert not left, (number, done, left)
    assert resident_mb("VmHWM") - before < 300
    ways = {way: sum(count for (kind, _), count in outcomes.items() if kind == way) for way, _ in outcomes}
    assert ways == {"check": 1000, "shown": 400, "fix": 300, "convert": 300}
    assert outcomes["check", "report"] > 700
    assert outcomes["shown", 1] > 200
    assert outcomes["fix", "written"] > 30
    assert outcomes["convert", "written"] > 10


def laid(files: dict[str, bytes], folder: Path) -> Path:
    """A folder with these files and no others."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def tried(draft: Path, target: Path, number: int, rng: random.Random) -> tuple[str, object]:
    """One mutant through the recipe, or through the command as it stands, and how that ended."""
    runtime, deep, pp = rng.choice(("vllm", "sglang")), rng.random() < 0.5, rng.choice((1, 2))
    known = str(target) if rng.random() < 0.5 else None
    way = ("check", "check", "check", "check", "check", "shown", "shown", "fix", "convert", "late")[number % 10]
    if way == "late":
        way = ("fix", "convert")[number % 20 // 10]
    if way == "check":
        try:
            report = check(CheckConfig(str(draft), known, runtime, None, pp, deep), SilentReporter())
        except SpecctlError as error:
            error.message.encode()
            return way, "error"
        assert all(tame(part, 4000) for f in report.findings for part in (f.where, f.expected, f.found))
        return way, "report"
    out, is_json = draft.parent / "out", rng.random() < 0.2
    if way == "convert":
        layout = rng.choice((*plugins.names("formats"), *["vllm"] * 6))
        told = {"aux_layers": rng.choice((None, "2,4,5")), "num_draft_tokens": 4, "dry_run": rng.random() < 0.3}
        code = printed(lambda: convert(str(draft), str(out), layout, target=known, json=is_json, **told), is_json)
    else:
        more = {"fix": str(out)} if way == "fix" else {"deep": deep}
        code = printed(lambda: check_ckpt(str(draft), known, runtime, pp=pp, json=is_json, **more), is_json)
    if out.exists():
        assert not open_checkpoint(out).problems
        shutil.rmtree(out)
        return way, "written"
    return way, code


def printed(command: Callable[[], int], is_json: bool = False) -> int:
    """The exit code of a command as `cli.app.run` gives it; its words must be few and harmless to a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = command()
        except SpecctlError as error:
            show_error(error)
            code = error.exit_code
    assert tame(out.getvalue(), 5_000_000 if is_json else 40_000), out.getvalue()[:5000]
    assert tame(err.getvalue(), 10_000), err.getvalue()[:5000]
    if is_json and out.getvalue():
        json.loads(out.getvalue())
    return code


def tame(text: str, limit: int) -> bool:
    """Whether `text` is short and has nothing that a terminal would obey."""
    return len(text) < limit and all(c.isprintable() or c in "\t\n" for c in text)


def resident_mb(name: str) -> float:
    """This process's resident memory: `VmRSS` now, `VmHWM` its peak since the last reset."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) / 1000 for line in text.splitlines() if line.startswith(f"{name}:"))


def reset_peak() -> None:
    # Other tests of this process have had their own peak.
    Path("/proc/self/clear_refs").write_text("5")


def is_foreign(path: str, tmp_path: Path) -> bool:
    """Whether a file was opened that is neither the checkpoint nor part of Python and its libraries."""
    inside = (str(tmp_path), sys.prefix, sys.base_prefix, str(ROOT / "specctl"), str(ROOT / "tests"))
    is_descriptor = path.isdigit()  # a file that was opened before, by its path
    return not is_descriptor and not path.startswith(inside) and not path.endswith((".py", ".pyc", ".so"))


def test_a_file_outside_the_folder_is_never_opened(tmp_path: Path) -> None:
    for rule_id in ("INDEX_PATH_ESCAPES", "LINK_OUTSIDE"):
        draft = BROKEN / rule_id / "draft"
        WATCH.update(on=True, events=[])
        assert rules_broken(draft) == [rule_id]
        WATCH["on"] = False
        opened = [Path(path).resolve() for event, path in WATCH["events"] if event == "open" and "fixtures" in path]  # type: ignore[attr-defined]
        assert opened
        assert all(path.is_relative_to(draft.resolve()) for path in opened)


def test_a_pickle_that_names_code_is_not_run(tmp_path: Path) -> None:
    WATCH.update(on=True, events=[])
    assert rules_broken(BROKEN / "WEIGHTS_UNSAFE" / "draft") == ["WEIGHTS_UNSAFE"]
    WATCH["on"] = False
    assert not [event for event, _ in WATCH["events"] if event != "open"]  # type: ignore[attr-defined]


# numbers and names without end


def saved(made: "fixtures.Draft", folder: Path, **settings: Any) -> Path:
    """The draft as a folder, with `settings` said in config.json and not followed by the tensors."""
    made.config |= settings
    fixtures.save(made, folder)
    return folder


def frequencies(made: "fixtures.Draft") -> "fixtures.Draft":
    made.tensors["rotary_emb.inv_freq"] = Table("F32", (2,), np.ones(2, "<f4").tobytes())
    return made


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e-320, float("nan"), 0, "x", None, True], ids=range(8))
@pytest.mark.parametrize("key", ["rope_theta", "factor"])
def test_a_rope_that_is_no_rope_is_a_finding_and_no_traceback(key: str, value: Any, tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4} | {key: value}
    settings = {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": rope}
    checked(saved(frequencies(fixtures.draft()), tmp_path / "draft", **settings))


def test_a_head_of_200_million_numbers_is_not_counted_through(tmp_path: Path) -> None:
    draft = saved(frequencies(fixtures.draft()), tmp_path / "draft", head_dim=2 * 10**8)
    before = resident_mb("VmRSS")
    reset_peak()
    began = time.process_time()
    checked(draft)
    assert time.process_time() - began < 1
    assert resident_mb("VmHWM") - before < 50


def test_no_mask_is_made_for_a_vocabulary_of_a_billion(tmp_path: Path) -> None:
    draft = saved(fixtures.draft(), tmp_path / "draft", vocab_size=2**30)
    before = resident_mb("VmRSS")
    reset_peak()
    findings = {finding.rule: finding for finding in checked(draft).findings}
    assert not findings["T2D_LENGTH"].is_repairable
    assert resident_mb("VmHWM") - before < 50


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_map_of_100_megabytes_has_the_wrong_length_and_stops_nothing(name: str, tmp_path: Path) -> None:
    made = fixtures.draft()
    made.drop(name)
    draft = saved(made, tmp_path / "draft")
    append_zeros(draft / "model.safetensors", name, "I64", [13_000_000])
    assert f"{name.upper()}_LENGTH" in [finding.rule for finding in checked(draft).findings]


def append_zeros(path: Path, name: str, dtype: str, shape: list[int]) -> None:
    """Add a tensor of zeros that takes no room: a hole in the file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    end = len(body) + fixtures_bytes(dtype, shape)
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + body)
        file.truncate(8 + len(text) + end)


def fixtures_bytes(dtype: str, shape: list[int]) -> int:
    return int(np.prod(shape)) * {"I64": 8, "F32": 4, "BF16": 2}[dtype]


def test_tables_of_two_dtypes_and_wide_rows_are_compared(tmp_path: Path) -> None:
    """Reading by bytes gave 512 rows of the one and 419 of the other; the check then stopped with a traceback."""
    width, rows = 20_000, 600
    config = json.loads((TARGET / "config.json").read_text()) | {"hidden_size": width, "vocab_size": rows}
    target = copy_of(TARGET, tmp_path / "target")
    (target / "config.json").write_text(json.dumps(config))
    for path in target.glob("*.safetensors"):
        path.unlink()
    (target / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    append_zeros(target / "model.safetensors", "model.embed_tokens.weight", "F32", [rows, width])
    made = fixtures.draft()
    made.drop("embed_tokens.weight")
    sizes = {"hidden_size": width, "target_hidden_size": width, "vocab_size": rows}
    draft = saved(made, tmp_path / "draft", **sizes)
    append_zeros(draft / "model.safetensors", "embed_tokens.weight", "BF16", [rows, width])
    report = checked(draft, "--target", str(target), "--deep")
    assert "EMBED_DIFFERS" not in [finding.rule for finding in report.findings]


def test_a_million_layers_and_20_000_unknown_tensors_are_told_in_few_words(tmp_path: Path) -> None:
    made = fixtures.draft()
    made.tensors |= {f"junk{i}": Table("BF16", (0,), b"") for i in range(20_000)}
    draft = saved(made, tmp_path / "draft", eagle_aux_hidden_state_layer_ids=list(range(1_000_000)))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert run(["check-ckpt", str(draft)]) == 1
    assert tame(out.getvalue(), 20_000)
    assert "more like these" in out.getvalue()


@pytest.mark.parametrize(
    "name", ["evil\x1b]0;owned\x07\x1b[2J", "\x9b31mred", "\u202ebidi", "a\nPASS: this draft loads"]
)
def test_no_name_of_a_file_steers_the_terminal_or_forges_a_line(name: str, tmp_path: Path) -> None:
    made = fixtures.draft()
    made.random(name, 2, 2)
    draft = saved(made, tmp_path / "draft", architectures=[name], model_type=name)
    # The recipe's findings are harmless by themselves, and the command's words whatever the recipe says.
    assert all(tame(part, 4000) for f in checked(draft).findings for part in (f.where, f.expected, f.found))
    words = printed_lines(name)
    assert tame(words, 500) and words.count("\n") == 4 and json.loads(words.splitlines()[3])["report"] == name
    for words in (["check-ckpt", str(draft)], ["check-ckpt", str(draft), "--json"]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert run(words) == 1
        assert tame(out.getvalue() + err.getvalue(), 40_000)
        assert not any(line.startswith("PASS") for line in out.getvalue().splitlines())
        if "--json" in words:
            assert any(name in f["found"] or f["found"] for f in json.loads(out.getvalue())["report"]["findings"])


def printed_lines(name: str) -> str:
    """A foreign name through each way to print a line."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show_lines([name])
        show_pairs({"key": name})
        show_table(("name",), [])
        show_json("check-ckpt", True, name)
    return out.getvalue()


# repairs that would launder a loss


def fix(draft: Path, out: Path) -> Any:
    return check_and_fix(CheckConfig(str(draft), fix=str(out)), SilentReporter())


def two_shards(made: "fixtures.Draft", folder: Path, lost: tuple[str, ...] = ()) -> Path:
    """A draft in two shards, of which the second holds the names in `lost` and may be missing."""
    fixtures.save(made, folder)
    (folder / "model.safetensors").unlink()
    kept = {name: table for name, table in made.tensors.items() if name not in lost}
    fixtures.write(folder / "a.safetensors", kept, None)
    weight_map = {name: "b.safetensors" if name in lost else "a.safetensors" for name in made.tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_lost_shard_is_not_repaired_away(tmp_path: Path) -> None:
    """The layer of the lost shard was struck from config.json, and the copy passed."""
    made = fixtures.draft(num_hidden_layers=2, tie_word_embeddings=True)
    lost = tuple(name for name in made.tensors if name.startswith("layers.1."))
    draft = two_shards(made, tmp_path / "draft", lost)
    assert any(finding.is_repairable for finding in checked(draft).findings)
    with pytest.raises(ContractError, match="INDEX_SHARD_MISSING"):
        fix(draft, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


@pytest.mark.parametrize("rule_id", ["TENSOR_TWICE", "LINK_OUTSIDE", "INDEX_PATH_ESCAPES", "WEIGHTS_BROKEN"])
def test_files_that_leave_open_what_is_meant_are_not_repaired(rule_id: str, tmp_path: Path) -> None:
    draft = copy_of(BROKEN / rule_id / "draft", tmp_path / "draft")
    if not (draft / "config.json").is_symlink():
        config = json.loads((draft / "config.json").read_text()) | {"tie_word_embeddings": True}
        (draft / "config.json").write_text(json.dumps(config))
    with pytest.raises(ContractError, match=rule_id):
        fix(draft, tmp_path / "fixed")


def test_two_names_of_one_tensor_are_not_repaired(tmp_path: Path) -> None:
    made = fixtures.draft(tie_word_embeddings=True)
    made.tensors["layers.0.input_layernorm.weight"] = made.tensors["midlayer.input_layernorm.weight"]
    with pytest.raises(ContractError, match="NAME_TWICE"):
        fix(saved(made, tmp_path / "draft"), tmp_path / "fixed")


def test_a_repaired_copy_keeps_settings_and_names_what_stayed_behind(tmp_path: Path) -> None:
    draft = saved(fixtures.draft(), tmp_path / "draft", tie_word_embeddings=True)
    kept = ("generation_config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "merges.txt")
    left = ("optimizer.pt", "modeling.py", "extra.safetensors", "other.index.json", "adapter_config.json", "weird")
    for name in (*kept, *left):
        (draft / name).write_bytes(name.encode())
    (draft / "secret.json").symlink_to("/etc/hostname")
    report = fix(draft, tmp_path / "fixed")
    files = {path.name: path for path in (tmp_path / "fixed").iterdir()}
    assert files.keys() == {"config.json", "model.safetensors", *kept}
    assert all(files[name].read_bytes() == name.encode() for name in kept)
    assert {f"{name}: not copied" for name in left} <= set(report.fixed.changes)


# streams that fail, and words that are no version


def shell(line: str) -> "subprocess.CompletedProcess[str]":
    """A line of bash with `specctl` in it, failures of every part of a pipe counted."""
    line = line.replace("specctl", f"{sys.executable} -m specctl")
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, cwd=ROOT, check=False)


COMMANDS = ("--help", "--version", "check-ckpt --rules", f"check-ckpt {HEALTHY / 'eagle3'}", "inspect --help")


@pytest.mark.parametrize("command", [*COMMANDS, f"check-ckpt {BROKEN / 'D2T_ZERO' / 'draft'} --json"])
@pytest.mark.parametrize(("to", "said"), [("/dev/full", "No space left on device"), ("&-", "the stream is closed")])
def test_results_that_cannot_be_written_are_an_error_of_the_machine(command: str, to: str, said: str) -> None:
    process = shell(f"specctl {command} >{to}")
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: the results cannot be written: {said}\n  in stdout\n")
    assert "Traceback" not in process.stderr and "bug" not in process.stderr


def test_a_closed_or_full_stderr_changes_no_answer() -> None:
    draft = BROKEN / "D2T_ZERO" / "draft"
    for to in ("&-", "/dev/full"):
        process = shell(f"specctl check-ckpt {draft} 2>{to}")
        assert process.returncode == 1
        assert process.stdout.splitlines()[-1].startswith("FAIL")
        assert shell(f"specctl check-ckpt /nowhere 2>{to}").returncode == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_leaves_early_is_no_failure(command: str) -> None:
    for python in ("specctl", "PYTHONUNBUFFERED=1 specctl"):
        process = shell(f"{python} {command} | head -1")
        assert (process.returncode, process.stderr) == (0, "")
        assert len(process.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.33.0rc2", (0, 33, 0)),
        ("0.33.0.dev12+gabc123.d20260101", (0, 33, 0)),
        ("0.5.10.post1", (0, 5, 10)),
        ("v0.33.0+cu129", (0, 33, 0)),
        ("1.0a", (1, 0)),
    ],
)
def test_versions_may_end_as_pep_440_has_it(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text, "vllm") == version


@pytest.mark.parametrize(
    "text", ["0.33.0garbage", "0.33.0 or so", "0.33.0+", "0.33.", "1!0.33", "0.33.0rc1rc2", "\u0663"]
)
def test_words_that_are_no_version_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no version"):
        parse_version(text, "vllm")

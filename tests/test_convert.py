"""`specctl convert` as a user runs it: containers in, one folder out, nothing half done."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from heads import DEPTH, VOCAB, Plan, config_of, make, make_target, save, tensors_of
from safetensors.torch import load_file, save_file

from specctl.cli.convert import grouped
from specctl.errors import InputError, TargetError, UsageError
from specctl.files.target import read_target
from specctl.files.tensors import read_array
from specctl.recipes.check import check
from specctl.recipes.convert import ConvertConfig, ConvertReport, convert
from specctl.records.check import CheckConfig
from specctl.records.progress import SilentReporter


def run(source: Path, out: Path, to: str = "vllm", **more: Any) -> ConvertReport:
    return convert(ConvertConfig(str(source), str(out), to, **more), SilentReporter())


def sharded(folder: Path, *, shards: int = 3) -> Path:
    """The default head over several files with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(Plan())))
    tensors = list(tensors_of(Plan()).items())
    weight_map = {}
    for i in range(shards):
        part = dict(tensors[i::shards])
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def plain_bytes(tmp_path: Path) -> bytes:
    run(make(tmp_path / "plain", Plan()), tmp_path / "plain-out")
    return (tmp_path / "plain-out" / "model.safetensors").read_bytes()


def test_shards_and_pickles_become_one_safetensors_file_of_the_same_bytes(tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text(json.dumps(config_of(Plan())))
    torch.save(tensors_of(Plan()), pickled / "pytorch_model.bin")
    expected = plain_bytes(tmp_path)
    for source in (sharded(tmp_path / "sharded"), pickled):
        run(source, tmp_path / f"{source.name}-out")
        assert sorted(p.name for p in (tmp_path / f"{source.name}-out").iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        assert (tmp_path / f"{source.name}-out" / "model.safetensors").read_bytes() == expected


def test_a_stray_file_beside_an_index_is_not_read(tmp_path: Path) -> None:
    source = sharded(tmp_path / "sharded")
    save_file({"lm_head.weight": torch.zeros(10, 8)}, source / "model.safetensors")
    run(source, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == plain_bytes(tmp_path)


@pytest.mark.parametrize(
    ("shard", "said"), [("model-9.safetensors", "nothing"), ("../../etc/passwd", "name of a file in the folder")]
)
def test_an_index_that_leads_nowhere_is_refused(shard: str, said: str, tmp_path: Path) -> None:
    source = sharded(tmp_path / "sharded")
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["fc.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(InputError, match=said) as caught:
        run(source, tmp_path / "out")
    assert "check-ckpt" in str(caught.value.hint)


def test_types_stay_as_they_are(tmp_path: Path) -> None:
    """vllm-project/speculators#136: a bf16 head came out as fp32, twice the size."""
    source = make(tmp_path / "source", Plan(dtype="bfloat16"))
    report = run(source, tmp_path / "out")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for name, t in made.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (made["d2t"].dtype, made["t2d"].dtype) == (torch.int64, torch.bool)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert report.bytes == sum(t.nbytes for t in made.values())


def test_every_tensor_is_traced_and_every_one_left_out_is_named(tmp_path: Path) -> None:
    tensors = tensors_of(Plan()) | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    del tensors["t2d"]
    report = run(
        save(tmp_path / "source", config_of(Plan()), tensors), tmp_path / "out", "speculators" if False else "vllm"
    )
    rows = {row.name: (row.source, row.change) for row in report.trace}
    assert rows.keys() == load_file(tmp_path / "out" / "model.safetensors").keys()
    assert rows["midlayer.mlp.up_proj.weight"] == ("model.safetensors: layers.0.mlp.up_proj.weight", "as it is")
    assert rows["t2d"] == ("-", "made from d2t")
    assert [row.name for row in report.dropped] == ["midlayer.self_attn.rotary_emb.inv_freq"]


def test_a_frequency_buffer_of_the_head_goes_along(tmp_path: Path) -> None:
    tensors = tensors_of(Plan()) | {"rotary_emb.inv_freq": torch.arange(3.0)}
    run(
        save(tmp_path / "source", config_of(Plan()), tensors),
        tmp_path / "nemo",
        "nemo",
        target=str(make_target(tmp_path / "t")),
    )
    assert "model.rotary_emb.inv_freq" in load_file(tmp_path / "nemo" / "model.safetensors")
    run(tmp_path / "nemo", tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["rotary_emb.inv_freq"], torch.arange(3.0))


def test_a_folder_that_is_there_is_not_touched(tmp_path: Path) -> None:
    source = make(tmp_path / "source", Plan())
    run(source, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(UsageError, match="found something there"):
        run(source, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"to": "gguf"}, "no format is called `gguf`"),
        ({"from_layout": "gguf"}, "no format is called `gguf`"),
        ({"source_layer_convention": "hf"}, "is none"),
        ({"aux_layers": "two"}, "neither `aux` nor a list"),
        ({"aux_layers": "aux"}, "of the target's N layers"),
        ({"num_draft_tokens": 0}, "1 or more"),
        ({"mask_token": -1}, "no token id"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        run(make(tmp_path / "source", Plan()), tmp_path / "out", **options)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "model_type": "bert"}
    with pytest.raises(UsageError, match="no layout of an EAGLE-3 head"):
        run(save(tmp_path / "bert", config, {"pooler.weight": torch.zeros(2)}), tmp_path / "out")


@pytest.mark.parametrize(("to", "runtime"), [("vllm", "vllm"), ("sglang", "sglang"), ("speculators", "vllm")])
def test_what_is_written_for_a_runtime_keeps_its_contract(to: str, runtime: str, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    run(make(tmp_path / "source", Plan()), tmp_path / "out", to, target=str(target))
    report = check(CheckConfig(draft=str(tmp_path / "out"), target=str(target), runtime=runtime), SilentReporter())
    assert (report.layout, report.passes) == (to, True), report.findings


# the command


def test_the_command_says_what_it_did_within_80_columns(tmp_path: Path, run_cli) -> None:
    source = make(tmp_path / "source", Plan())
    process = run_cli("convert", source, tmp_path / "out", "--to", "specforge")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0].startswith("from\tvllm, ")
    assert "midlayer.hidden_norm.weight\tas it is\tmodel.safetensors: midlayer.hidden_norm.weight" in lines
    assert max(map(len, lines[lines.index("config.json") :])) <= 80


def test_tensors_that_were_renamed_alike_are_one_line_on_a_terminal(tmp_path: Path) -> None:
    report = run(
        make(tmp_path / "source", Plan()), tmp_path / "out", "speculators", target=str(make_target(tmp_path / "t"))
    )
    rows = grouped(report.trace)
    assert ("layers.0.*", "10", "as it is", "model.safetensors: midlayer.*") in rows
    assert ("*", "5", "as it is", "model.safetensors: *") in rows
    assert sum(int(count) for _, count, _, _ in rows) == len(report.trace)


def test_json_is_one_object_with_the_trace(tmp_path: Path, run_cli) -> None:
    source = make(tmp_path / "source", Plan())
    process = run_cli("convert", source, tmp_path / "out", "--to", "sglang", "--json", "--quiet")
    record = json.loads(process.stdout)
    assert (process.returncode, process.stderr, record["ok"]) == (0, "", True)
    assert (record["report"]["from_layout"], record["report"]["to"]) == ("vllm", "sglang")
    assert len(record["report"]["trace"]) == len(load_file(tmp_path / "out" / "model.safetensors"))


def test_a_dry_run_writes_nothing_and_says_the_same(tmp_path: Path, run_cli) -> None:
    source = make(tmp_path / "source", Plan())
    dry = run_cli("convert", source, tmp_path / "out", "--to", "sglang", "--json", "--dry-run")
    assert not (tmp_path / "out").exists()
    wet = run_cli("convert", source, tmp_path / "out", "--to", "sglang", "--json")
    one, other = (json.loads(p.stdout)["report"] for p in (dry, wet))
    assert (one.pop("written"), other.pop("written")) == (False, True)
    assert one == other


def test_a_refusal_names_the_option_that_settles_it(tmp_path: Path, run_cli) -> None:
    source = make(tmp_path / "source", Plan(layers=2, parallel=True, own_embedding=True))
    config = config_of(Plan(layers=2, parallel=True))
    (source / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "mask_token_id"}))
    process = run_cli("convert", source, tmp_path / "out", "--to", "vllm")
    assert process.returncode == 2
    assert "--mask-token" in process.stderr
    assert process.stdout == ""


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    source = make(tmp_path / "source", Plan())
    code = (
        "import sys; from specctl.cli.app import run\n"
        f"code = run(['convert', {str(source)!r}, {str(tmp_path / 'out')!r}, '--to', 'sglang', '--quiet'])\n"
        "heavy = [m for m in ('torch', 'transformers', 'pyarrow', 'safetensors') if m in sys.modules]\n"
        "print(code, heavy, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert process.stderr.strip() == "0 []"


def big_head(folder: Path, rows: int = 100_000_000) -> Path:
    """A head whose table, of 1.6 GB by default, takes no room: a hole in the file."""
    plan = Plan(own_head=False, draft_vocab=VOCAB)
    tensors = tensors_of(plan)
    source = save(folder, config_of(plan), tensors)
    path = source / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    end = max(info["data_offsets"][1] for name, info in header.items() if name != "__metadata__")
    header["embed_tokens.weight"] = {"dtype": "BF16", "shape": [rows, 8], "data_offsets": [end, end + rows * 16]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + raw[8 + size :])
        file.truncate(8 + len(text) + end + rows * 16)
    config = config_of(plan) | {"vocab_size": rows, "draft_vocab_size": None}
    (source / "config.json").write_text(json.dumps(config))
    return source


def test_an_interrupt_halfway_leaves_nothing(tmp_path: Path) -> None:
    source = big_head(tmp_path / "source")
    process = subprocess.Popen(
        [sys.executable, "-m", "specctl", "convert", str(source), str(tmp_path / "out"), "--to", "vllm"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not any(p.stat().st_size > 1 << 20 for p in tmp_path.glob(".out.*/model.safetensors")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


class Counted(SilentReporter):
    """Keeps what a bar would show."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, task: str, total: int | None, unit: str, done: int = 0) -> None:
        self.calls.append(("start", task, total, unit))

    def advance(self, amount: int) -> None:
        self.calls.append(("advance", amount))

    def stop(self) -> None:
        self.calls.append(("stop",))


def test_a_large_head_is_written_with_progress(tmp_path: Path) -> None:
    source, reporter = big_head(tmp_path / "source", rows=2_000_000), Counted()
    report = convert(ConvertConfig(str(source), str(tmp_path / "out"), "vllm"), reporter)
    megabytes = report.bytes // 1_000_000
    assert (reporter.calls[0], reporter.calls[-1]) == (("start", "writing", megabytes, "MB"), ("stop",))
    steps = [call[1] for call in reporter.calls[1:-1]]
    assert (sum(steps), len(steps) > 3) == (megabytes, True)


def test_what_vllm_would_not_find_is_converted_with_a_word(tmp_path: Path) -> None:
    source = sharded(tmp_path / "sharded")
    (source / "sub").mkdir()
    index = source / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    (source / "model-0.safetensors").rename(source / "sub" / "model-0.safetensors")
    moved = {name: f"sub/{file}" if file == "model-0.safetensors" else file for name, file in weight_map.items()}
    index.write_text(json.dumps({"weight_map": moved}))
    (source / "consolidated.safetensors").write_bytes(b"never opened")
    run(source, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == plain_bytes(tmp_path)


# the target, by its headers


OPENED: dict[str, Any] = {"on": False, "paths": []}


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if OPENED["on"] and event == "open" and isinstance(arguments[0], str):
        OPENED["paths"].append(arguments[0])


sys.addaudithook(_watch)


def test_of_a_sharded_target_only_the_shards_with_its_two_tables_are_opened(tmp_path: Path) -> None:
    """As with transformers' own `from_pretrained` a target of 200 shards was opened whole to get two tables."""
    plain = make_target(tmp_path / "plain")
    tables = load_file(plain / "model.safetensors")
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_bytes((plain / "config.json").read_bytes())
    parts = [{f"model.layers.{i}.w": torch.ones(1)} for i in range(4)]
    parts[0]["model.embed_tokens.weight"] = tables["model.embed_tokens.weight"]
    parts[3]["lm_head.weight"] = tables["lm_head.weight"]
    for i, part in enumerate(parts):
        save_file(part, target / f"part-{i}.safetensors")
    weight_map = {name: f"part-{i}.safetensors" for i, part in enumerate(parts) for name in part}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    OPENED.update(on=True, paths=[])
    found = read_target(target)
    OPENED["on"] = False
    assert found.embedding is not None and found.lm_head is not None
    opened = {Path(path).name for path in OPENED["paths"] if path.endswith(".safetensors")}
    assert opened == {"part-0.safetensors", "part-3.safetensors"}


def test_a_target_is_read_from_nested_settings_and_shards(tmp_path: Path) -> None:
    plain = make_target(tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    text = {key: value for key, value in config.items() if key not in ("architectures",)}
    nested = tmp_path / "nested"
    nested.mkdir()
    (nested / "config.json").write_text(
        json.dumps({"architectures": ["XForConditionalGeneration"], "text_config": text})
    )
    (nested / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tables = load_file(plain / "model.safetensors")
    names = {
        "model.language_model.embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
    }
    for i, (name, old) in enumerate(names.items()):
        save_file({name: tables[old]}, nested / f"part-{i}.safetensors")
    index = {"weight_map": {name: f"part-{i}.safetensors" for i, name in enumerate(names)}}
    (nested / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_target(nested)
    assert found.embedding is not None and found.lm_head is not None
    assert torch.equal(
        torch.from_numpy(read_array(found.embedding).copy()), tables["model.embed_tokens.weight"].float()
    )
    facts = found.facts
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (DEPTH, 8, VOCAB)
    assert (facts.eos_token_ids, facts.is_multimodal) == ((7, 9), True)
    assert facts.rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_a_target_in_the_hubs_cache_is_called_by_its_hub_id(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "models--Qwen--Qwen3-8B" / "snapshots" / "abc")
    assert read_target(folder).facts.name == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    "config", [{}, {"hidden_size": 8}, {"hidden_size": "8", "vocab_size": 4, "num_hidden_layers": 2}]
)
def test_a_target_that_says_no_sizes_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "target", config, {})
    with pytest.raises(TargetError, match="does not say"):
        read_target(tmp_path / "target")


def test_a_folder_without_a_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="the target cannot be read"):
        read_target(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TargetError, match="cannot be used"):
        read_target(tmp_path)

"""`specctl check-ckpt`: each rule with its broken draft, published heads, hostile files, and what it prints."""

import json
import os
import pty
import random
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import BROKEN, HEADERS, HEALTHY, TARGET, checked, config_of, copy_of, materialise, mutate, rules_broken
from conftest import ROOT

from fixtures import broken as fixtures
from specctl.errors import InputError, SpecctlError, UsageError
from specctl.recipes.check import check, explain, parse_version, rules
from specctl.recipes.repair import check_and_fix
from specctl.records.check import CheckConfig
from specctl.records.contract import LEVELS
from specctl.records.progress import SilentReporter

RULES = [rule.id for rule in rules()]
STANDARD = (
    ("eagle3", ()),
    ("eagle3", ("--target", "../broken/target", "--deep")),
    ("eagle3", ("--target", "../broken/target", "--deep", "--pp", "2")),
    ("eagle3", ("--runtime", "sglang", "--target", "../broken/target", "--deep")),
    ("peagle", ()),
    ("peagle", ("--target", "../broken/target", "--deep")),
)


def options_of(rule_id: str) -> list[str]:
    return list(json.loads((BROKEN / rule_id / "options.json").read_text()))


def test_every_rule_has_a_broken_fixture_and_every_fixture_a_rule() -> None:
    assert sorted(RULES) == sorted(fixtures.BROKEN)
    assert sorted(RULES) == sorted(path.name for path in BROKEN.iterdir() if path.name != "target")
    assert len(set(RULES)) == len(RULES)


def test_the_fixtures_are_what_the_generator_makes() -> None:
    assert fixtures.main(["check"]) == 0


@pytest.mark.parametrize("rule_id", RULES)
def test_the_broken_fixture_yields_exactly_its_finding(rule_id: str) -> None:
    assert rules_broken(BROKEN / rule_id / "draft", *options_of(rule_id)) == [rule_id]


@pytest.mark.parametrize(("kind", "options"), STANDARD)
def test_the_healthy_fixtures_yield_nothing(kind: str, options: tuple[str, ...]) -> None:
    assert checked(HEALTHY / kind, *options).findings == ()


@pytest.mark.parametrize("rule_id", RULES)
def test_the_finding_says_where_what_and_how_and_rests_on_a_source(rule_id: str) -> None:
    (finding,) = checked(BROKEN / rule_id / "draft", *options_of(rule_id)).findings
    for part in (finding.where, finding.expected, finding.found, finding.fix, finding.source):
        assert part.strip()
        assert len(part) < 400
        assert not part.endswith(".")
    rule = explain(rule_id)
    assert len(rule.says.split()) <= 12
    assert rule.story.endswith(".")
    assert len(rule.story) > 60


@pytest.mark.parametrize(
    "rule_id",
    [r for r in RULES if any(f.is_repairable for f in checked(BROKEN / r / "draft", *options_of(r)).findings)],
)
def test_a_repaired_copy_passes_and_the_draft_is_untouched(rule_id: str, tmp_path: Path) -> None:
    from dataclasses import replace

    draft = BROKEN / rule_id / "draft"
    before = {path.name: path.read_bytes() for path in draft.iterdir()}
    config = replace(config_of(draft, options_of(rule_id)), fix=str(tmp_path / "fixed"))
    report = check_and_fix(config, SilentReporter())
    assert report.fixed is not None
    assert rule_id in report.fixed.repaired
    assert report.fixed.changes or rule_id == "WEIGHTS_PICKLE"
    assert [finding.rule for finding in report.fixed.check.findings] == []
    assert {path.name: path.read_bytes() for path in draft.iterdir()} == before
    assert sorted(path.name for path in (tmp_path / "fixed").iterdir()) == ["config.json", "model.safetensors"]


def test_enough_rules_have_a_repair() -> None:
    repairable = {
        finding.rule
        for rule_id in RULES
        for finding in checked(BROKEN / rule_id / "draft", *options_of(rule_id)).findings
        if finding.is_repairable
    }
    assert repairable >= {
        "NAME_PREFIX",
        "LAYERS_COUNT",
        "D2T_ABSOLUTE",
        "D2T_DTYPE",
        "AUX_LAYERS_UNSORTED",
        "ROPE_MROPE",
    }
    assert not repairable & {"TENSOR_MISSING", "D2T_DUPLICATE", "VALUES_NOT_FINITE", "AUX_LAYERS_CONTRADICT"}


@pytest.mark.parametrize("path", sorted(HEADERS.glob("*.json")), ids=lambda path: path.stem)
def test_published_heads_are_recognised_and_break_the_rules_they_are_known_for(path: Path, tmp_path: Path) -> None:
    record = materialise(path, tmp_path / "head")
    assert record["source"]
    for runtime in ("vllm", "sglang"):
        report = checked(tmp_path / "head", "--runtime", runtime)
        assert report.layout == record["layout"]
        expected = [rule for rule in record["breaks"][runtime] if rule != "WEIGHTS_PICKLE"]
        assert sorted(finding.rule for finding in report.findings) == sorted(expected)


def test_findings_come_worst_first() -> None:
    report = checked(BROKEN / "SPECULATORS_HIDDEN" / "draft", "--runtime", "sglang", "--deep")
    levels = [LEVELS.index(finding.level) for finding in report.findings]
    assert len(levels) > 1
    assert levels == sorted(levels)


# -- what the runtime would read --------------------------------------------------------------------------------------


def edited(folder: Path, tmp_path: Path, **settings: object) -> Path:
    """A copy of a draft whose config.json says something else; None removes a key."""
    draft = copy_of(folder, tmp_path / "edited")
    config = json.loads((draft / "config.json").read_text()) | settings
    kept = {key: value for key, value in config.items() if not (key in settings and value is None)}
    (draft / "config.json").write_text(json.dumps(kept))
    return draft


def test_the_effective_boundary_ids_are_always_said(tmp_path: Path) -> None:
    assert checked(HEALTHY / "eagle3").aux_ids == (2, 4, 5)
    implicit = BROKEN / "AUX_LAYERS_IMPLICIT" / "draft"
    assert checked(implicit).aux_ids is None
    assert checked(implicit, "--target", "../target").aux_ids == (2, 4, 5)
    nested = edited(HEALTHY / "eagle3", tmp_path, eagle_aux_hidden_state_layer_ids=None)
    assert checked(nested, "--runtime", "sglang").aux_ids == (2, 4, 5)


def test_nested_ids_are_one_too_early_for_the_runner_of_parallel_drafting(tmp_path: Path) -> None:
    draft = edited(HEALTHY / "peagle", tmp_path, eagle_aux_hidden_state_layer_ids=None)
    report = checked(draft)
    assert report.aux_ids == (1, 3, 4)
    assert report.declared_aux_ids == (2, 4, 5)
    assert [(f.rule, f.level) for f in report.findings] == [("AUX_LAYERS_NESTED", "error")]


def test_nested_ids_with_the_default_by_luck_are_a_warning(tmp_path: Path) -> None:
    draft = edited(HEALTHY / "eagle3", tmp_path, eagle_aux_hidden_state_layer_ids=None)
    (finding,) = checked(draft, "--target", str(TARGET)).findings
    assert (finding.rule, finding.level) == ("AUX_LAYERS_NESTED", "warning")


@pytest.mark.parametrize(
    ("draft", "runtime", "version", "rule", "level"),
    [
        ("NAME_LAYERS_SGLANG", "sglang", "0.5.11", "NAME_LAYERS_SGLANG", "error"),
        ("NAME_LAYERS_SGLANG", "sglang", "0.5.12", "NAME_LAYERS_SGLANG", "warning"),
        ("D2T_UNNEEDED", "vllm", "0.30.0", "D2T_UNNEEDED", "error"),
        ("D2T_UNNEEDED", "vllm", "0.29.0", None, None),
        ("MASK_TOKEN_SPELLING", "vllm", "0.27.1", "MASK_TOKEN_SPELLING", "error"),
        ("MASK_TOKEN_SPELLING", "vllm", "0.28.0", "MASK_TOKEN_SPELLING", "warning"),
        ("AUX_LAYERS_ZERO", "vllm", "0.33.1", "AUX_LAYERS_ZERO", "error"),
        ("AUX_LAYERS_ZERO", "vllm", "0.34.0", None, None),
        ("AUX_COUNT_VERSION", "vllm", "0.22.0", None, None),
    ],
)
def test_rules_follow_the_version(draft: str, runtime: str, version: str, rule: str | None, level: str | None) -> None:
    report = checked(BROKEN / draft / "draft", "--runtime", runtime, "--runtime-version", version)
    assert [(f.rule, f.level) for f in report.findings] == ([] if rule is None else [(rule, level)])


@pytest.mark.parametrize(
    ("text", "version"), [("0.33.0", (0, 33, 0)), ("v0.5.10.post1", (0, 5, 10)), ("1", (1,)), ("0.34.0rc1", (0, 34, 0))]
)
def test_versions_are_read(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text, "vllm") == version


@pytest.mark.parametrize("text", ["newest", "", "-1", "0" * 40 + "x", "..", "9" * 400])
def test_what_is_no_version_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_version(text, "vllm")


def test_a_reduced_draft_without_map_breaks_in_both_servers(tmp_path: Path) -> None:
    draft = copy_of(BROKEN / "D2T_MISSING" / "draft", tmp_path / "draft")
    (draft / "eagle_meta.pt").write_bytes(b"not looked into")
    for runtime in ("vllm", "sglang"):
        (finding,) = checked(draft, "--runtime", runtime).findings
        assert finding.rule == "D2T_MISSING"
        assert "eagle_meta.pt" in finding.found


def test_zeros_that_t2d_confirms_are_no_fault() -> None:
    made = fixtures.draft()
    made.numbers("d2t", [0] * 10)
    made.numbers("t2d", [i < 10 for i in range(40)], "BOOL")
    assert [rule for rule in _rules_of(made) if rule != "EOS_NOT_DRAFTED"] == []


def _rules_of(made: "fixtures.Draft", *options: str) -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        fixtures.save(made, Path(folder) / "draft")
        return rules_broken(Path(folder) / "draft", *options)


@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 24), (24,)])
def test_three_shapes_of_the_mask_are_one(shape: tuple[int, ...]) -> None:
    made = fixtures.draft(parallel=True)
    made.random("mask_hidden", *shape)
    assert _rules_of(made) == []


def test_a_mask_wider_than_three_drafts_needs_vllm_0_22() -> None:
    made = fixtures.draft(parallel=True, target_hidden_size=12)
    assert _rules_of(made) == []
    made = fixtures.draft(parallel=True, target_hidden_size=12)
    assert _rules_of(made, "--runtime-version", "0.21.0") == ["MASK_HIDDEN_SIZE"]


def test_an_explicit_head_dim_is_honoured() -> None:
    assert _rules_of(fixtures.draft(head_dim=6, num_attention_heads=4, num_key_value_heads=2)) == []
    made = fixtures.draft(head_dim=6, num_attention_heads=4, num_key_value_heads=2)
    made.random("midlayer.self_attn.q_proj.weight", 8, 16)
    assert _rules_of(made) == ["SHAPE_WRONG"]


def test_deeper_layers_are_hidden_wide() -> None:
    assert _rules_of(fixtures.draft(num_hidden_layers=2)) == []
    made = fixtures.draft(num_hidden_layers=2)
    made.random("layers.1.self_attn.q_proj.weight", 8, 16)
    assert _rules_of(made) == ["SHAPE_WRONG"]


@pytest.mark.parametrize("key", ["model.", "draft_model.", "eagle_module.", "module."])
def test_every_known_prefix_is_found_and_mended(key: str, tmp_path: Path) -> None:
    made = fixtures.draft()
    made.tensors = {key + name: table for name, table in made.tensors.items()}
    fixtures.save(made, tmp_path / "draft")
    assert rules_broken(tmp_path / "draft") == ["NAME_PREFIX"]
    report = check_and_fix(CheckConfig(str(tmp_path / "draft"), fix=str(tmp_path / "fixed")), SilentReporter())
    assert report.fixed is not None
    assert report.fixed.check.findings == ()


def test_a_head_with_several_faults_is_mended_in_one_go(tmp_path: Path) -> None:
    made = fixtures.draft(attention_bias=False)
    made.config |= {"num_hidden_layers": 32, "architectures": ["LlamaEagle3DraftModel"], "tie_word_embeddings": True}
    del made.config["rope_theta"]
    made.tensors = {"model." + name: table for name, table in made.tensors.items()}
    fixtures.save(made, tmp_path / "draft")
    report = check_and_fix(
        CheckConfig(str(tmp_path / "draft"), runtime="sglang", fix=str(tmp_path / "fixed")), SilentReporter()
    )
    assert report.fixed is not None
    assert report.fixed.check.passes
    assert not [f for f in report.fixed.check.findings if f.level == "error"]


def test_sorting_the_layers_moves_the_blocks_of_fc(tmp_path: Path) -> None:
    from dataclasses import replace

    import numpy as np

    from specctl.files.safetensors import read_header
    from specctl.files.tensors import read_array

    draft = BROKEN / "AUX_LAYERS_UNSORTED" / "draft"
    check_and_fix(replace(CheckConfig(str(draft)), fix=str(tmp_path / "fixed")), SilentReporter())
    old = read_array(read_header(draft / "model.safetensors")[0]["fc.weight"])
    new = read_array(read_header(tmp_path / "fixed" / "model.safetensors")[0]["fc.weight"])
    states = {5: np.arange(8.0), 2: np.arange(8.0) + 10, 4: np.arange(8.0) - 5}
    listed = np.concatenate([states[5], states[2], states[4]])
    rising = np.concatenate([states[2], states[4], states[5]])
    assert np.allclose(old.astype(np.float64) @ listed, new.astype(np.float64) @ rising)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((HEALTHY / "eagle3",), 0),
        ((HEALTHY / "eagle3", "--target", TARGET, "--deep"), 0),
        ((BROKEN / "SLIDING_WINDOW" / "draft",), 0),
        ((BROKEN / "D2T_ZERO" / "draft",), 1),
        (("/nowhere/at/all",), 2),
        ((HEALTHY / "eagle3", "--runtime", "trt"), 2),
        ((HEALTHY / "eagle3", "--pp", "0"), 2),
        ((HEALTHY / "eagle3", "--target", "/nowhere/at/all"), 2),
        ((HEALTHY / "eagle3", "--layout", "zip"), 2),
        (("--explain", "NO_SUCH_RULE"), 2),
    ],
)
def test_exit_codes(arguments: tuple[object, ...], code: int, run_cli) -> None:
    process = run_cli("check-ckpt", *arguments)
    assert process.returncode == code, process.stderr
    if code == 2:
        assert process.stderr.startswith("error: ")
        assert "Traceback" not in process.stderr
    else:
        assert process.stdout.splitlines()[-1].startswith(("PASS", "FAIL")[code])


def test_a_passing_draft_comes_with_the_command_that_serves_it(run_cli) -> None:
    out = run_cli("check-ckpt", HEALTHY / "peagle", "--target", TARGET).stdout
    (line,) = [line for line in out.splitlines() if line.startswith("serve\t")]
    settings = json.loads(re.search(r"--speculative-config '(.*)'", line)[1])  # type: ignore[index]
    assert settings["method"] == "eagle3"
    assert settings["num_speculative_tokens"] == 4
    assert settings["parallel_drafting"] is True
    out = run_cli("check-ckpt", HEALTHY / "eagle3", "--runtime", "sglang").stdout
    assert "--speculative-algorithm EAGLE3" in out
    assert "--speculative-num-draft-tokens 4" in out


def test_a_p_eagle_head_for_sglang_is_sent_to_vllm(run_cli) -> None:
    process = run_cli("check-ckpt", HEALTHY / "peagle", "--runtime", "sglang")
    assert process.returncode == 1
    assert "SGLang cannot serve P-EAGLE heads; use vLLM >= 0.16" in process.stdout
    assert "instead\tserve it with vLLM" in process.stdout


def test_json_has_the_findings_and_the_verdict(run_cli) -> None:
    process = run_cli("check-ckpt", BROKEN / "TENSOR_MISSING" / "draft", "--json")
    record = json.loads(process.stdout)
    assert (process.returncode, record["ok"]) == (1, False)
    (finding,) = record["report"]["findings"]
    assert finding["rule"] == "TENSOR_MISSING"
    assert finding["level"] == "error"


def test_the_rules_are_listed_and_each_is_explained(run_cli) -> None:
    listed = run_cli("check-ckpt", "--rules").stdout.splitlines()
    assert [line.split("\t")[0] for line in listed[1:]] == RULES
    told = run_cli("check-ckpt", "--explain", "d2t-missing").stdout
    assert "eagle_meta.pt" in told
    assert "did you mean" in run_cli("check-ckpt", "--explain", "D2T_MISING").stderr


@pytest.mark.parametrize("rule_id", ["D2T_MISSING", "AUX_LAYERS_NESTED", "ROPE_MROPE"])
def test_messages_fit_a_terminal_of_80_columns(rule_id: str) -> None:
    text = in_terminal("check-ckpt", f"fixtures/broken/{rule_id}/draft")
    lines = [line for line in text.splitlines() if "--speculative-config" not in line]
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    assert rule_id in text
    assert "\x1b[" not in text


def in_terminal(*arguments: str) -> str:
    """What a person sees on a terminal of 80 columns."""
    leader, follower = pty.openpty()
    subprocess.run(["stty", "cols", "80", "rows", "50"], stdin=follower, check=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "specctl", *arguments], stdout=follower, stderr=subprocess.DEVNULL, cwd=ROOT
    )
    os.close(follower)
    data = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        data += part
    os.close(leader)
    process.wait()
    return data.decode().replace("\r\n", "\n")


def test_fix_refuses_the_draft_itself_and_a_folder_that_exists(tmp_path: Path, run_cli) -> None:
    draft = copy_of(BROKEN / "NAME_PREFIX" / "draft", tmp_path / "draft")
    assert run_cli("check-ckpt", draft, "--fix", draft).returncode == 2
    assert run_cli("check-ckpt", draft, "--fix", tmp_path / "fixed").returncode == 0
    again = run_cli("check-ckpt", draft, "--fix", tmp_path / "fixed")
    assert again.returncode == 2
    assert "Traceback" not in again.stderr


def test_fix_writes_nothing_where_nothing_has_one_repair(tmp_path: Path, run_cli) -> None:
    process = run_cli("check-ckpt", BROKEN / "TENSOR_MISSING" / "draft", "--fix", tmp_path / "fixed")
    assert process.returncode == 1
    assert "TENSOR_MISSING" in process.stderr
    assert not (tmp_path / "fixed").exists()


def test_a_draft_in_the_hub_cache_is_read_by_its_id(tmp_path: Path, run_cli) -> None:
    repo = tmp_path / "hub" / "models--org--draft"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    for path in (HEALTHY / "eagle3").iterdir():
        (repo / "blobs" / path.stem).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.stem)
    env = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    process = run_cli("check-ckpt", "org/draft", env=env)
    assert process.returncode == 0, process.stderr
    assert '"model": "org/draft"' in process.stdout
    missing = run_cli("check-ckpt", "org/other", env=env)
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: the draft `org/other`")


# -- cost and hostility -----------------------------------------------------------------------------------------------


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
    """CPU seconds, best of three, and the largest memory in MB of a run."""
    best = float("inf")
    for _ in range(3):
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
    names = ("WEIGHTS_STRAY", "WEIGHTS_PICKLE", "TENSOR_TWICE", "NORM_RESIDUAL_IMPLICIT", "NORMS_SPECULATORS_PEAGLE")
    folders = [HEALTHY / "eagle3", HEALTHY / "peagle", *(BROKEN / name / "draft" for name in names)]
    made = fixtures.draft(num_hidden_layers=3, attention_bias=True, mlp_bias=True, fc_norm=True, parallel=True)
    fixtures.save(made, tmp_path / "deep")
    return [*folders, tmp_path / "deep"]


def test_2000_mutated_checkpoints_end_in_a_report_or_one_of_our_errors(tmp_path: Path) -> None:
    import time

    drafts = sources(tmp_path)
    rng = random.Random(2025)
    target = copy_of(TARGET, tmp_path / "target")
    outcomes = {"report": 0, "error": 0}
    for number in range(2000):
        draft = copy_of(rng.choice(drafts), tmp_path / "mutant")
        done = [mutate(draft, rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        runtime = rng.choice(("vllm", "sglang"))
        config = CheckConfig(
            str(draft),
            str(target) if rng.random() < 0.5 else None,
            runtime,
            None,
            rng.choice((1, 2)),
            rng.random() < 0.5,
        )
        WATCH.update(on=True, events=[])
        began = time.monotonic()
        try:
            report = check(config, SilentReporter())
            json.dumps([f.found for f in report.findings]).encode()
            "".join(f.found + f.where + f.expected for f in report.findings).encode()
            outcomes["report"] += 1
        except SpecctlError as error:
            error.message.encode()
            outcomes["error"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number}: {done}") from error
        finally:
            WATCH["on"] = False
        assert time.monotonic() - began < 5, (number, done)
        outside = [e for e in WATCH["events"] if e[0] != "open" or is_foreign(e[1], tmp_path)]  # type: ignore[attr-defined]
        assert not outside, (number, done, outside)
    assert outcomes["report"] > 1000
    assert outcomes["error"] < 500


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


def test_an_empty_folder_is_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        checked(tmp_path)

"""`specctl check-ckpt`: each rule with its broken draft, published heads, and what it prints."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import BROKEN, HEADERS, HEALTHY, TARGET, checked, config_of, copy_of, materialise, rules_broken
from conftest import ROOT

from fixtures import broken as fixtures
from specctl.errors import InputError, UsageError
from specctl.recipes.check import explain, parse_version, rules
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
    before = {path: path.read_bytes() for path in draft.rglob("*") if path.is_file()}
    config = replace(config_of(draft, options_of(rule_id)), fix=str(tmp_path / "fixed"))
    report = check_and_fix(config, SilentReporter())
    assert report.fixed is not None
    assert rule_id in report.fixed.repaired
    assert report.fixed.changes or rule_id in ("WEIGHTS_PICKLE", "WEIGHTS_CONSOLIDATED", "INDEX_SUBFOLDER")
    assert [finding.rule for finding in report.fixed.check.findings] == []
    assert {path: path.read_bytes() for path in draft.rglob("*") if path.is_file()} == before
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
    found = [(f.rule, f.level) for f in report.findings if f.rule != "VERSION_UNREAD"]
    assert found == ([] if rule is None else [(rule, level)])


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
        ((HEALTHY / "eagle3", "--from", "zip"), 2),
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


def test_an_empty_folder_is_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        checked(tmp_path)


def test_a_hidden_size_that_the_heads_do_not_divide_is_refused_as_transformers_does() -> None:
    made = fixtures.draft(num_attention_heads=3, num_key_value_heads=1)
    assert _rules_of(made) == ["HEADS_DIVIDE"]


# -- siblings of the faults that were reported ------------------------------------------------------------------------


def test_one_key_of_the_wrong_type_does_not_hide_the_other_findings(tmp_path: Path) -> None:
    draft = edited(HEALTHY / "eagle3", tmp_path, sliding_window="x", eos_token_id=[2, 99999], hidden_act="gelu")
    assert rules_broken(draft) == ["ACTIVATION_UNKNOWN", "CONFIG_TYPE", "EOS_OUT_OF_RANGE"]


def test_an_end_of_text_beyond_the_vocabulary_is_found_where_sizes_are_missing(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    config = {"vocab_size": 129280, "eos_token_id": 151645, "hidden_size": 7168}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    found = checked(tmp_path / "draft").findings
    (finding,) = [f for f in found if f.rule == "EOS_OUT_OF_RANGE"]
    assert "151645" in finding.found
    assert "129280" in finding.expected


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"dtype": "bf16"}, "CONFIG_TYPE"),
        ({"rms_norm_eps": 1}, "CONFIG_TYPE"),
        ({"initializer_range": 1}, "CONFIG_TYPE"),
        ({"use_cache": "yes"}, "CONFIG_TYPE"),
        ({"use_cache": None}, None),
        ({"attention_dropout": "0"}, "CONFIG_TYPE"),
        ({"layer_types": ["foo"]}, "CONFIG_TYPE"),
        ({"hidden_act": "relu"}, "ACTIVATION_UNKNOWN"),
        ({"head_dim": 4.0}, "CONFIG_TYPE"),
        ({"num_hidden_layers": True}, "CONFIG_TYPE"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4,5"}, "CONFIG_TYPE"),
        ({"eagle_aux_hidden_state_layer_ids": [2.0, 4.0, 5.0]}, "CONFIG_TYPE"),
        ({"eagle_aux_hidden_state_layer_ids": [True, 4, 5]}, "CONFIG_TYPE"),
        ({"draft_vocab_size": "10"}, "CONFIG_TYPE"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "ROPE_CONTRADICTS"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}}, "ROPE_INCOMPLETE"),
        ({"rope_parameters": {"rope_type": "bogus", "rope_theta": 1e4}}, "ROPE_INCOMPLETE"),
        ({"norm_before_residual": 0}, None),
    ],
)  # fmt: skip
def test_values_that_readers_refuse_are_errors(changes: dict[str, object], rule: str | None, tmp_path: Path) -> None:
    report = checked(edited(HEALTHY / "eagle3", tmp_path, **changes))
    errors = [f.rule for f in report.findings if f.level == "error"]
    assert (rule in errors) if rule is not None else not errors


def test_a_byte_order_mark_is_refused_as_transformers_does(tmp_path: Path) -> None:
    draft = copy_of(HEALTHY / "eagle3", tmp_path / "draft")
    (draft / "config.json").write_bytes(b"\xef\xbb\xbf" + (draft / "config.json").read_bytes())
    assert rules_broken(draft) == ["CONFIG_BROKEN"]


@pytest.mark.parametrize(
    ("architecture", "ids", "read"),
    [
        ("LlamaForCausalLM", [1, 3, 4], (2, 4, 5)),
        ("GptOssForCausalLM", [4, 6, 8], (4, 6, 8)),
        ("GptOssForCausalLM", [1, 3, 4], (2, 4, 5)),
        ("DeepseekV3ForCausalLM", [2, 4, 5], (2, 4, 5)),
        ("DeepseekV3ForCausalLM", [1, 3, 4], (2, 4, 5)),
    ],
)
def test_sglang_reads_nested_ids_by_the_family_of_the_target(
    architecture: str, ids: list[int], read: tuple[int, ...], tmp_path: Path
) -> None:
    draft = edited(
        HEALTHY / "eagle3",
        tmp_path,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": ids},
    )
    target = edited(TARGET, tmp_path / "t", architectures=[architecture])
    assert checked(draft, "--runtime", "sglang", "--target", str(target)).aux_ids == read


def test_layers_that_are_provably_misread_fail_whatever_the_target(tmp_path: Path) -> None:
    draft = edited(
        HEALTHY / "eagle3",
        tmp_path,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [24, 30, 36]},
    )
    report = checked(draft)
    assert not report.passes
    assert [f.rule for f in report.findings] == ["AUX_LAYERS_NESTED"]


@pytest.mark.parametrize("said", [None, 40])
def test_a_reduced_head_that_the_config_does_not_say_is_one_finding(said: int | None, tmp_path: Path) -> None:
    draft = edited(HEALTHY / "eagle3", tmp_path, draft_vocab_size=said)
    (finding,) = checked(draft).findings
    assert (finding.rule, finding.is_repairable) == ("DRAFT_VOCAB_UNSAID", True)


def test_a_head_without_fused_states_says_what_it_reads(tmp_path: Path) -> None:
    made = fixtures.draft()
    made.config["eagle_config"]["use_aux_hidden_state"] = False
    assert _rules_of(made) == ["NAME_UNKNOWN"]
    made.drop("fc.weight")
    fixtures.save(made, tmp_path / "draft")
    assert checked(tmp_path / "draft").aux_ids == ()


@pytest.mark.parametrize("name", ["Phi3ForCausalLM", "InternLM3ForCausalLM", "Qwen2MoeForCausalLM"])
def test_targets_that_inherit_the_capture_are_fine_in_sglang(name: str, tmp_path: Path) -> None:
    target = edited(TARGET, tmp_path, architectures=[name])
    assert rules_broken(HEALTHY / "eagle3", "--runtime", "sglang", "--target", str(target), "--deep") == []


def test_old_vllm_takes_only_targets_of_its_list(tmp_path: Path) -> None:
    target = edited(TARGET, tmp_path, architectures=["MistralForCausalLM"], model_type="mistral")
    options = ("--target", str(target), "--runtime-version", "0.20.0")
    assert rules_broken(HEALTHY / "eagle3", *options) == ["TARGET_CLASS"]
    assert rules_broken(HEALTHY / "eagle3", "--target", str(target)) == []


def test_sglang_puts_the_embedding_in_place_of_a_tied_head(tmp_path: Path) -> None:
    made = fixtures.draft(full=True)
    made.config["tie_word_embeddings"] = True
    assert _rules_of(made, "--runtime", "sglang") == ["TIED_REDUCED"]
    assert _rules_of(made) == []


def test_a_map_over_the_whole_vocabulary_counts_in_sglang(tmp_path: Path) -> None:
    made = fixtures.draft(full=True)
    made.numbers("d2t", [5] * 40)
    assert "D2T_RANGE" in _rules_of(made, "--runtime", "sglang")
    made.numbers("d2t", [0] * 40)
    assert _rules_of(made, "--runtime", "sglang") == []


def test_a_speculators_layer_of_another_family_is_refused(tmp_path: Path) -> None:
    draft = copy_of(BROKEN / "NORM_RESIDUAL_IMPLICIT" / "draft", tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    config["norm_before_residual"] = True
    config["transformer_layer_config"]["model_type"] = "mistral"
    (draft / "config.json").write_text(json.dumps(config))
    assert rules_broken(draft) == ["SPECULATORS_INCOMPLETE"]


def test_sglang_knows_three_old_names_for_the_norms_before_fc() -> None:
    made = fixtures.draft(fc_norm=True)
    for old, new in (("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"), ("aux_norm_high", "fc_norm.2")):
        made.tensors[f"{old}.weight"] = made.tensors.pop(f"{new}.weight")
    assert _rules_of(made, "--runtime", "sglang") == []
    assert "NAME_UNKNOWN" in _rules_of(made)


def test_a_lost_layer_is_not_repaired_away(tmp_path: Path) -> None:
    made = fixtures.draft(num_hidden_layers=2)
    made.drop(*[name for name in made.tensors if name.startswith("layers.1.")])
    fixtures.save(made, tmp_path / "draft")
    (finding,) = checked(tmp_path / "draft").findings
    assert (finding.rule, finding.is_repairable) == ("LAYERS_COUNT", False)

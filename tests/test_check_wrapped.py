"""`check-ckpt` on what trainers and hand edits leave: wrapped names, cast frequencies, scaled ropes, windows."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HEALTHY, checked, copy_of, rules_broken
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specctl.recipes.convert import ConvertConfig, convert
from specctl.recipes.repair import check_and_fix
from specctl.records.check import CheckConfig
from specctl.records.progress import SilentReporter
from specctl.records.rope import inverse_frequencies

QUIET = SilentReporter()
Tensors = dict[str, torch.Tensor]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
OTHERS: tuple[dict[str, Any], ...] = (
    {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "default", "rope_theta": 500000.0},
)


def draft(
    tmp_path: Path, *, config: dict[str, Any] | None = None, tensors: Callable[[Tensors], Tensors] | None = None
) -> Path:
    """A healthy EAGLE-3 head with other config keys and tensors."""
    folder = copy_of(HEALTHY / "eagle3", tmp_path / "draft")
    raw = {**json.loads((folder / "config.json").read_text()), **(config or {})}
    (folder / "config.json").write_text(json.dumps(raw))
    if tensors is not None:
        save_file(tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def said(rope: dict[str, Any]) -> dict[str, Any]:
    """Both spellings of a rope."""
    scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
    return {"rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def of_transformers(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    sizes = {"hidden_size": 2 * head_dim, "num_attention_heads": 2, "head_dim": head_dim}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LlamaConfig(**sizes, max_position_embeddings=256, rope_parameters=dict(rope))
        if rope["rope_type"] == "default":
            return 1 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        found: torch.Tensor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))[0]
    return found


@pytest.mark.parametrize("head_dim", [4, 64, 128])
@pytest.mark.parametrize("rope", [LLAMA3, YARN, *OTHERS], ids=lambda rope: rope["rope_type"])
def test_frequencies_of_scaled_ropes_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    found = inverse_frequencies(rope, head_dim)
    assert found is not None
    expected = of_transformers(rope, head_dim).double()
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda rope: rope["rope_type"])
def test_a_scaled_rope_that_was_edited_after_training_is_found(rope: dict[str, Any], tmp_path: Path) -> None:
    def trained(tensors: Tensors) -> Tensors:
        return {**tensors, "rotary_emb.inv_freq": of_transformers(rope, 4).float()}

    assert rules_broken(draft(tmp_path, config=said(rope), tensors=trained)) == []
    for key, value in (("factor", 32.0), ("rope_theta", 500000.0)):
        edited = said({**rope, key: value})
        assert rules_broken(draft(tmp_path, config=edited, tensors=trained)) == ["ROPE_INV_FREQ"], key
    plain = said({"rope_type": "default", "rope_theta": 10000.0})
    assert rules_broken(draft(tmp_path, config=plain, tensors=trained)) == ["ROPE_INV_FREQ"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frequencies_that_were_cast_with_the_head_are_no_error(dtype: torch.dtype, tmp_path: Path) -> None:
    def cast(tensors: Tensors) -> Tensors:
        frequencies = of_transformers({"rope_type": "default", "rope_theta": 10000.0}, 4)
        return {**tensors, "rotary_emb.inv_freq": frequencies.to(dtype)}

    assert rules_broken(draft(tmp_path, tensors=cast)) == []


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("midlayer.", "midlayer._checkpoint_wrapped_module."),
        lambda name: name.replace("midlayer.", "_fsdp_wrapped_module.midlayer._fsdp_wrapped_module."),
    ],
)
def test_what_wrappers_leave_in_names_is_found_mended_and_converted(
    wrapped: Callable[[str], str], tmp_path: Path
) -> None:
    folder = draft(tmp_path, tensors=lambda tensors: {wrapped(name): t for name, t in tensors.items()})
    assert rules_broken(folder) == ["NAME_PREFIX"]
    check_and_fix(CheckConfig(str(folder), fix=str(tmp_path / "mended")), QUIET)
    original = load_file(HEALTHY / "eagle3" / "model.safetensors")
    mended = load_file(tmp_path / "mended" / "model.safetensors")
    assert mended.keys() == original.keys()
    assert all(torch.equal(mended[name], original[name]) for name in original)


def test_a_window_that_layer_types_asks_for_and_nobody_gives_is_an_error(tmp_path: Path) -> None:
    """vLLM reads `config.sliding_window` there: the load stops, or with null the layer attends fully."""
    sliding = {"layer_types": ["sliding_attention"]}
    for more in ({}, {"sliding_window": None}):
        (finding,) = checked(draft(tmp_path, config={**sliding, **more})).findings
        assert (finding.rule, finding.level) == ("SLIDING_WINDOW", "error")
    (finding,) = checked(draft(tmp_path, config={**sliding, "sliding_window": 16})).findings
    assert (finding.rule, finding.level) == ("SLIDING_WINDOW", "warning")
    off = {**sliding, "sliding_window": 16, "use_sliding_window": False}
    assert rules_broken(draft(tmp_path, config=off)) == ["SLIDING_WINDOW"]
    assert rules_broken(draft(tmp_path, config={"sliding_window": 16, "use_sliding_window": False})) == []


@pytest.mark.parametrize("factors", [[1.0] * 48, [1.0], ["a", "b"], [1.0, -1.0]])
def test_longrope_factors_of_another_length_or_kind_are_an_error(factors: list[Any], tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": factors}
    rope["original_max_position_embeddings"] = 64
    assert rules_broken(draft(tmp_path, config=said(rope))) == ["ROPE_INCOMPLETE"]
    assert rules_broken(draft(tmp_path, config=said({**rope, "long_factor": [1.0, 2.0]}))) == []


@pytest.mark.parametrize("name", ["partial_rotary_factor", "rotary_pct"])
def test_a_part_of_the_head_that_turns_is_told_by_both_names(name: str, tmp_path: Path) -> None:
    assert rules_broken(draft(tmp_path, config={name: 0.5})) == ["ROPE_PARTIAL"]


def test_raising_the_length_keeps_a_rope_that_is_made_from_it(tmp_path: Path) -> None:
    """A yarn without its first length takes `max_position_embeddings` for it: raised alone, every frequency moves."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    target = str(HEALTHY.parent / "broken" / "target")
    folder = draft(tmp_path, config={**said(rope), "max_position_embeddings": 128})
    check_and_fix(CheckConfig(str(folder), target=target, fix=str(tmp_path / "mended")), QUIET)
    convert(ConvertConfig(str(folder), str(tmp_path / "out"), to="vllm", target=target), QUIET)
    for made in ("mended", "out"):
        config = json.loads((tmp_path / made / "config.json").read_text())
        assert config["max_position_embeddings"] == 512
        assert config["rope_parameters"]["original_max_position_embeddings"] == 128, made
        assert config["rope_scaling"]["original_max_position_embeddings"] == 128, made

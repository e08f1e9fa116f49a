"""A checkpoint whose tensors are not those that the model takes is refused: transformers loads it without a word."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fixtures.make import make_tiny
from specctl.core.target import describe_target, load_target
from specctl.errors import NotSupportedError, SpecctlError, TargetError

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
SIDE = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}


def changed(tmp_path: Path, change: Callable[[Tensors], Tensors], family: str = "llama", **config: Any) -> str:
    """A copy of a tiny target with other tensors and other config keys."""
    folder = tmp_path / "target"
    shutil.copytree(make_tiny(family), folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {**json.loads((folder / "config.json").read_text()), **config}
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def load(folder: str) -> Any:
    return load_target(describe_target(folder), dtype="float32", device=CPU).model


def as_fp8(scale: str) -> Callable[[Tensors], Tensors]:
    """Projections in float8 with a scale beside each, as ModelOpt and others store them."""

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if name.endswith("_proj.weight"):
                size = tensor.abs().max() / 448
                found[name], found[name.replace("weight", scale)] = (tensor / size).to(torch.float8_e4m3fn), size
            else:
                found[name] = tensor
        return found

    return change


def as_int8(tensors: Tensors) -> Tensors:
    return {n: (t * 100).to(torch.int8) if n.endswith("_proj.weight") else t for n, t in tensors.items()}


def with_biases(tensors: Tensors) -> Tensors:
    weights = [name for name in tensors if name.endswith("q_proj.weight")]
    return {**tensors, **{n.replace("weight", "bias"): torch.ones(len(tensors[n])) for n in weights}}


def test_a_quantization_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    """It would skip the scales with a note in its log (NVIDIA/TensorRT-Model-Connect#1115)."""
    folder = changed(tmp_path, as_fp8("weight_scale"), quantization_config=MODELOPT)
    with pytest.raises(NotSupportedError, match="quantized with `modelopt`, which transformers cannot read"):
        load(folder)


def test_a_quantization_that_only_the_side_file_tells_is_known_and_refused(tmp_path: Path) -> None:
    folder = changed(tmp_path, as_fp8("weight_scale"))
    (Path(folder) / "hf_quant_config.json").write_text(json.dumps(SIDE))
    assert describe_target(folder).quantization == "modelopt"
    with pytest.raises(NotSupportedError, match="`modelopt`"):
        load(folder)


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"quantization": null}'])
def test_a_side_file_that_says_nothing_changes_nothing(text: str, tmp_path: Path) -> None:
    folder = changed(tmp_path, dict)
    (Path(folder) / "hf_quant_config.json").write_text(text)
    assert describe_target(folder).quantization is None
    load(folder)


@pytest.mark.parametrize(("change", "dtype"), [(as_fp8("weight_scale_inv"), "F8_E4M3"), (as_int8, "I8")])
def test_packed_weights_without_a_word_in_the_config_are_refused(
    change: Callable[[Tensors], Tensors], dtype: str, tmp_path: Path
) -> None:
    with pytest.raises(NotSupportedError, match=f"`model.layers.0.mlp.down_proj.weight` holds {dtype}"):
        load(changed(tmp_path, change))


def test_biases_that_the_config_does_not_state_are_refused(tmp_path: Path) -> None:
    """Weights of Qwen2 under a Llama configuration: the biases would be left out."""
    with pytest.raises(TargetError, match=r"holds `model.layers.0.self_attn.q_proj.bias` and 7 more"):
        load(changed(tmp_path, with_biases))


def test_a_checkpoint_with_more_layers_than_the_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"has a layer 6 and 1 more, and `config.json` states 6 layers, 0 to 5"):
        load(changed(tmp_path, dict, num_hidden_layers=6))


def test_a_further_layer_for_drafting_and_other_towers_are_no_fault(tmp_path: Path) -> None:
    """A layer behind the last that is made otherwise (multi-token prediction) is left out, as it must be."""

    def more(tensors: Tensors) -> Tensors:
        last = {n.replace("layers.7", "layers.8"): t.clone() for n, t in tensors.items() if "layers.7." in n}
        extra = {"model.layers.8.eh_proj.weight": torch.ones(32, 64), "model.visual.patch.weight": torch.ones(3, 3)}
        return {**tensors, **last, **extra, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}

    load(changed(tmp_path, more))


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    folder = changed(tmp_path, dict, vocab_size=300)
    with pytest.raises(TargetError, match=r"`lm_head.weight` is \[264, 32\] in the checkpoint and \[300, 32\] by"):
        load(folder)


def test_a_target_whose_config_states_no_dtype_is_computed_in_that_of_its_weights(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: {n: t.bfloat16() for n, t in tensors.items()})
    config = json.loads((Path(folder) / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):
        config.pop(key, None)
    (Path(folder) / "config.json").write_text(json.dumps(config))
    assert describe_target(folder).compute_dtype == "bfloat16"


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "moe", "gemma3", "multimodal", "hybrid"])
def test_what_families_leave_out_by_themselves_is_no_fault(family: str) -> None:
    try:
        load(str(make_tiny(family)))
    except SpecctlError as error:
        pytest.fail(str(error))

"""What is read of a target before its weights load, and how broken ones are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.make import check, make_tiny
from specctl.core.decoder import find_decoder
from specctl.core.target import describe_target, empty_model, load_target, load_tokenizer, text_settings
from specctl.errors import NotSupportedError, TargetError

CPU = torch.device("cpu")


def altered(tmp_path: Path, family: str = "llama", **changes: Any) -> Path:
    """A copy of a tiny target with other config keys; None removes one."""
    folder = tmp_path / "target"
    shutil.copytree(make_tiny(family), folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_depth_and_width_come_from_the_text_part_of_a_wrapper(tmp_path: Path) -> None:
    """The vision tower's layer count was used (NVIDIA-NeMo/Automodel#3071)."""
    raw = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 26, "hidden_size": 2304, "vocab_size": 99},
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 12},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    spec = describe_target(str(tmp_path))
    assert (spec.num_layers, spec.hidden_size, spec.text_prefix) == (26, 2304, "text_config")


def test_a_null_text_part_falls_back_to_the_flat_fields() -> None:
    flat = {"text_config": None, "num_hidden_layers": 3}
    assert text_settings(flat) == ("", flat)


@pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
def test_nested_text_parts_of_every_name_are_found(key: str) -> None:
    assert text_settings({key: {"num_hidden_layers": 7}}) == (key, {"num_hidden_layers": 7})
    assert text_settings({"thinker_config": {key: {"n": 1}}}) == (f"thinker_config.{key}", {"n": 1})


def test_layers_of_a_multimodal_wrapper_are_the_text_models() -> None:
    spec = describe_target(str(make_tiny("multimodal")))
    decoder = find_decoder(empty_model(spec), spec.num_layers)
    assert (decoder.path, len(decoder.layers)) == ("model.language_model.layers", 5)


def test_a_tower_as_deep_as_the_text_model_is_not_taken_for_it(tmp_path: Path) -> None:
    folder = altered(tmp_path, "multimodal")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["num_hidden_layers"] = 5
    (folder / "config.json").write_text(json.dumps(config))
    spec = describe_target(str(folder))
    assert find_decoder(empty_model(spec), 5).path == "model.language_model.layers"


def test_the_dtype_of_states_is_the_compute_dtype_never_a_storage_dtype(tmp_path: Path) -> None:
    """States of int8 or float8 came out of quantized targets (NVIDIA/Model-Optimizer#383)."""
    quantized = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    for dtype, expected in (("int8", "bfloat16"), ("float8_e4m3fn", "bfloat16"), ("float16", "float16")):
        folder = altered(tmp_path / dtype, dtype=dtype, quantization_config=quantized)
        spec = describe_target(str(folder))
        assert (spec.compute_dtype, spec.quantization) == (expected, "compressed-tensors")


def test_both_spellings_of_the_dtype_are_read(tmp_path: Path) -> None:
    folder = altered(tmp_path, dtype=None, torch_dtype="bfloat16")
    assert describe_target(str(folder)).compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    "content", [b"GGUF\x03\0\0\0", b"GGUF\x03\0\0\0" + b"\xff" * 200, b"not a model at all, sorry"]
)
def test_a_damaged_gguf_file_is_one_error_without_a_traceback(tmp_path: Path, content: bytes, run_cli: Any) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(TargetError):
        describe_target(str(tmp_path))


def test_a_damaged_gguf_file_exits_2_from_the_command_line(tmp_path: Path, run_cli: Any) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    (tmp_path / "data.jsonl").write_text('{"text": "hello there"}\n')
    process = run_cli("extract", tmp_path, tmp_path / "data.jsonl", "--out", tmp_path / "out")
    assert process.returncode == 2
    assert "ends after 8 bytes, within its header" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_with_several_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(TargetError, match="2 GGUF files"):
        describe_target(str(tmp_path))


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "nofolder", "a/b/c"])
def test_a_wrong_path_is_told_without_asking_the_network(name: str) -> None:
    with pytest.raises(TargetError, match="neither a folder nor a hub id"):
        describe_target(name)


def test_a_folder_that_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"neither `config\.json` nor a GGUF file"):
        describe_target(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "nobody_knows_this"}', "{}"])
def test_a_config_that_cannot_be_read_is_told(tmp_path: Path, text: str) -> None:
    folder = altered(tmp_path)
    (folder / "config.json").write_text(text)
    with pytest.raises(TargetError, match=r"config\.json"):
        describe_target(str(folder))


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    folder = altered(tmp_path)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(NotSupportedError, match="encoder-decoder"):
        describe_target(str(folder))


def test_missing_tensors_are_an_error_not_random_values(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = altered(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 tensors .* `model\.layers\.3\.mlp\.up_proj\.weight`"):
        load_target(describe_target(str(folder)), dtype="float32", device=CPU)


def test_a_truncated_weights_file_is_told(tmp_path: Path) -> None:
    folder = altered(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TargetError, match="cannot load the target's weights"):
        load_target(describe_target(str(folder)), dtype="float32", device=CPU)


def test_fine_tunes_of_one_model_have_different_fingerprints(tmp_path: Path) -> None:
    folder = altered(tmp_path)
    before = describe_target(str(folder)).weights_fingerprint
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert describe_target(str(folder)).weights_fingerprint != before


def test_a_models_own_code_does_not_run_unless_trusted(tmp_path: Path) -> None:
    """And when it runs, hooks on its layers do what its forward does not offer (transformers 5.15
    ignores `output_hidden_states` on such classes)."""
    folder = altered(
        tmp_path,
        model_type="homemade",
        auto_map={
            "AutoConfig": "modeling.HomemadeConfig",
            "AutoModelForCausalLM": "modeling.Homemade",
        },
    )
    (folder / "modeling.py").write_text(
        "import pathlib\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class HomemadeConfig(LlamaConfig):\n    model_type = 'homemade'\n"
        "class Homemade(LlamaForCausalLM):\n    config_class = HomemadeConfig\n"
    )
    with pytest.raises(TargetError) as caught:
        describe_target(str(folder))
    assert not (tmp_path / "ran").exists()
    assert "--trust-remote-code" in str(caught.value.hint)
    spec = describe_target(str(folder), trust_remote_code=True)
    target = load_target(spec, dtype="float32", device=CPU, trust_remote_code=True)
    assert type(target.model).__name__ == "Homemade"
    assert len(target.decoder.layers) == 8


def test_a_target_without_tokenizer_is_told(tmp_path: Path) -> None:
    folder = altered(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(TargetError, match="no tokenizer"):
        load_tokenizer(describe_target(str(folder)))


def test_tiny_targets_are_what_their_hashes_say() -> None:
    assert check() == 0


def test_a_property_that_counts_layers_otherwise_does_not_hide_what_is_written(tmp_path: Path) -> None:
    """LongCat's configuration answers twice its `num_layers`."""
    raw = {"model_type": "longcat_flash", "num_layers": 4, "hidden_size": 32, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert describe_target(str(tmp_path)).num_layers == 4


def test_a_decoder_that_is_called_an_encoder_is_found_where_nothing_else_fits() -> None:
    """ChatGLM keeps its layers at `transformer.encoder.layers`; beside a decoder it is another modality's."""

    class Tower(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    class Model(nn.Module):
        def __init__(self, **towers: int) -> None:
            super().__init__()
            for name, count in towers.items():
                setattr(self, name, Tower(count))

    assert find_decoder(Model(encoder=3), 3).path == "encoder.layers"
    assert find_decoder(Model(encoder=3, decoder=3), 3).path == "decoder.layers"
    with pytest.raises(TargetError, match="no list of layers of the length 4"):
        find_decoder(Model(encoder=3, decoder=3), 4)


def test_a_configuration_without_a_word_on_tied_embeddings_is_untied(tmp_path: Path) -> None:
    """A configuration class of a model's own code need not have the key."""
    from specctl.core.target import _is_tied

    assert not _is_tied({}, {}, object())
    assert _is_tied({"tie_word_embeddings": True}, {}, object())

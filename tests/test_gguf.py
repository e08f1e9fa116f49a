"""A GGUF file becomes the model it was made from. The files are written here, tensor by tensor."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_format
import numpy as np
import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from fixtures.make import SPECIALS, VOCAB_SIZE, _byte_alphabet, make_tiny
from specctl.core import gguf
from specctl.core.target import load_tokenizer
from specctl.errors import MachineError, TargetError

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """`model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{NAMES[rest]}.weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of rotary halves that GGUF writers use for queries and keys."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, model: Any, *, without: str | None = None, rope: Callable[[Any], object] | None = None
) -> None:
    config = model.config
    writer = gguf_format.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*_byte_alphabet(), *SPECIALS[:-1], "ab"])
    writer.add_token_types([1] * 256 + [3] * (len(SPECIALS) - 1) + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(259)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if name != without:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if rope is not None:
        rope(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(make_tiny("llama"))


def test_a_gguf_file_gives_the_logits_of_the_model_it_holds(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    folder = gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache", "f:1")
    found = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        assert torch.equal(found(ids).logits, model(ids).logits)
    assert gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache", "f:1") == folder


def test_a_gguf_file_that_lost_its_embedding_is_refused(model: Any, tmp_path: Path) -> None:
    """It loads with a one-line log, and every logit is random (huggingface/transformers#31725)."""
    write_gguf(tmp_path / "tiny.gguf", model, without="model.embed_tokens.weight")
    with pytest.raises(TargetError, match=r"`model\.embed_tokens\.weight` was not found"):
        gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache", "f:2")
    assert not list((tmp_path / "cache").iterdir())


def test_a_gguf_folder_extracts_from_the_command_line(model: Any, tmp_path: Path, chats: Any, run_cli: Any) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    template = tmp_path / "chatml.jinja"
    template.write_text(load_template())
    process = run_cli(
        *("extract", tmp_path / "tiny.gguf", chats(3), "--out", tmp_path / "o", "--layers", "0,last,norm"),
        *("--chat-template", template, "--device", "cpu", "--pp", "2"),
        env={"HF_HOME": str(tmp_path / "hf")},
    )
    assert process.returncode == 0, process.stderr
    assert "0, 8, norm in bfloat16" in process.stdout
    assert "it/s" not in process.stderr


# Rope scaling, which transformers leaves in the file (huggingface/transformers, modeling_gguf_pytorch_utils.py)


THETA = 10000.0
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONG, SHORT = [1.0, 3.0, 9.0, 20.0], [1.0, 1.1, 1.25, 1.5]
LONGROPE = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT, "factor": 8.0}


def llama3_divisors(factor: float, original: int, head_dim: int) -> np.ndarray:
    """What convert_hf_to_gguf.py writes as `rope_freqs.weight`, float32 [head_dim / 2]."""
    found = []
    for i in range(head_dim // 2):
        wave = 2 * math.pi * THETA ** (2 * i / head_dim)
        smooth = min(max((original / wave - 1) / (4 - 1), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


def say(**values: Any) -> Callable[[Any], None]:
    """Writes keys `llama.rope.scaling.*`, and arrays as tensors."""

    def write(writer: Any) -> None:
        for name, value in values.items():
            key = f"llama.rope.scaling.{name}"
            if isinstance(value, (np.ndarray, list)):
                writer.add_tensor(f"{name}.weight", np.array(value, np.float32))
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)

    return write


ROPES: dict[str, tuple[dict[str, Any], Callable[[Any], None]]] = {
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 64}, say(rope_freqs=llama3_divisors(8.0, 64, 8))),
    "llama3 by 32": (
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
        say(type="none", rope_freqs=llama3_divisors(32.0, 8192, 8)),
    ),
    "linear": ({"rope_type": "linear", "factor": 4.0}, say(type="linear", factor=4.0)),
    "linear, unsaid": ({"rope_type": "linear", "factor": 4.0}, say(factor=4.0)),
    "yarn": (
        YARN,
        say(type="yarn", factor=8.0, original_context_length=64, yarn_ext_factor=1.0, finetuned=1),
    ),
    "yarn with all its keys": (
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        say(
            type="yarn",
            factor=8.0,
            original_context_length=64,
            yarn_beta_fast=16.0,
            yarn_beta_slow=2.0,
            yarn_attn_factor=1 + 0.1 * math.log(8),
        ),
    ),
    "longrope": (
        LONGROPE | {"original_max_position_embeddings": 64, "attention_factor": 1.25},
        say(rope_factors_long=LONG, rope_factors_short=SHORT, original_context_length=64, attn_factor=1.25),
    ),
    "none": ({"rope_type": "default"}, say(type="none")),
}


@pytest.mark.parametrize("length", [40, 96])
@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rope_in_a_gguf_file_is_that_of_the_model_it_was_made_from(
    model: Any, tmp_path: Path, kind: str, length: int
) -> None:
    parameters, keys = ROPES[kind]
    model.config.rope_parameters = {"rope_theta": THETA, **parameters}
    source = type(model)(model.config).eval()
    source.load_state_dict(model.state_dict())
    write_gguf(tmp_path / "tiny.gguf", model, rope=keys)
    found = AutoModelForCausalLM.from_pretrained(gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache", "f:1"))
    ids = torch.arange(length)[None]
    with torch.inference_mode():
        assert torch.allclose(found(ids).logits, source(ids).logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(source(ids).logits, model(ids).logits) == (kind == "none")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (say(type="su-rope", factor=4.0), r"`llama\.rope\.scaling\.type` of this GGUF file is 'su-rope'"),
        (say(type="yarn", factor=4.0), r"`llama\.rope\.scaling\.original_context_length` .* is missing"),
        (
            say(type="yarn", factor=4.0, original_context_length=64, yarn_attn_factor=2.0),
            r"`llama\.rope\.scaling\.yarn_attn_factor` .* is 2, .*; yarn by 4 has 1\.139",
        ),
        (
            say(type="yarn", factor=4.0, original_context_length=64, yarn_log_multiplier=0.1),
            r"`llama\.rope\.scaling\.yarn_log_multiplier` .* is 0\.1; transformers knows 0 alone",
        ),
        (say(alpha=1000.0), r"`llama\.rope\.scaling\.alpha` .* no key that specctl knows"),
        (say(rope_factors_long=LONG, original_context_length=64), r"`rope_factors_short\.weight` .* is missing"),
        (say(rope_freqs=[1.0, 2.0, 1.5, 3.0]), r"`rope_freqs\.weight` .* divides frequencies by 1 to 3"),
        (
            say(type="linear", factor=2.0, rope_freqs=llama3_divisors(8.0, 64, 8)),
            r"`rope_freqs\.weight` .* is not Llama 3's",
        ),
    ],
)
def test_a_rope_that_transformers_cannot_express_is_refused_by_name(
    model: Any, tmp_path: Path, keys: Callable[[Any], None], said: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, rope=keys)
    with pytest.raises(TargetError, match=said) as caught:
        gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache", "f:1")
    assert "original safetensors checkpoint" in str(caught.value.hint)
    assert not list((tmp_path / "cache").iterdir())


def test_a_copy_made_before_rope_was_read_is_not_used(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, rope=say(type="linear", factor=4.0))
    made = gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache", "f:1")
    older = tmp_path / "older" / "f-1"
    shutil.copytree(made, older)
    assert gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "older", "f:1") != older
    assert json.loads((made / "config.json").read_text())["rope_parameters"]["rope_type"] == "linear"


# The cache and the file


def test_a_part_of_a_split_gguf_file_is_refused_with_the_way_to_merge_it(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-00002-of-00003.gguf", model)
    with pytest.raises(TargetError, match="is part 2 of a GGUF file split in 3") as caught:
        gguf.dequantize(tmp_path / "tiny-00002-of-00003.gguf", tmp_path / "cache", "f:1")
    assert "--merge tiny-00001-of-00003.gguf tiny.gguf" in str(caught.value.hint)


def test_a_cache_that_cannot_be_made_is_a_machine_error(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(MachineError, match="cannot write the dequantised target") as caught:
        gguf.dequantize(tmp_path / "tiny.gguf", tmp_path / "cache" / "gguf", "f:1")
    assert caught.value.where == str(tmp_path / "cache" / "gguf") and "HF_HOME" in str(caught.value.hint)


FULL = """
import sys
from pathlib import Path
from specctl.core import gguf
from specctl.errors import MachineError
try:
    gguf.dequantize(Path(sys.argv[1]), Path(sys.argv[2]), "f:1")
except MachineError as error:
    print(error.message)
"""


def test_a_copy_that_does_not_fit_on_the_disk_is_a_machine_error_and_leaves_nothing(model: Any, tmp_path: Path) -> None:
    def small() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    write_gguf(tmp_path / "tiny.gguf", model)
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "tiny.gguf"), str(tmp_path / "cache")],
        preexec_fn=small,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert process.stdout.startswith("cannot write the dequantised target: "), process.stderr
    assert list((tmp_path / "cache").iterdir()) == []


def load_template() -> str:
    from specctl.core.target import describe_target

    return str(load_tokenizer(describe_target(str(make_tiny("llama")))).chat_template)

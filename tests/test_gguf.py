"""A GGUF file becomes the model it was made from. The files are written here, tensor by tensor."""

from pathlib import Path
from typing import Any

import gguf as gguf_format
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fixtures.make import SPECIALS, VOCAB_SIZE, _byte_alphabet, make_tiny
from specctl.core import gguf
from specctl.core.target import load_tokenizer
from specctl.errors import TargetError

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


def write_gguf(path: Path, model: Any, *, without: str | None = None) -> None:
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


def load_template() -> str:
    from specctl.core.target import describe_target

    return str(load_tokenizer(describe_target(str(make_tiny("llama")))).chat_template)

"""A model that carries more than one stream between its layers is refused before a pipeline of it starts."""

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from fixtures.make import IDS, VOCAB_SIZE, make_tiny
from specctl.core.split import check_split
from specctl.core.target import describe_target
from specctl.errors import NotSupportedError

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    **IDS,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
GEMMA4 = {"head_dim": 8, "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
MADE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "a norm before the layers": ("NanoChatForCausalLM", "NanoChatConfig", {}, "its forward runs `norm` 2 times"),
    "an input for each layer": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE},
        "layers 2 to 3 do not run alone",
    ),
    "an index beside the stream": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**LATENT, **EXPERTS, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 8},
        "layers 0 to 1 do not run alone",
    ),
}


@pytest.mark.parametrize("what", sorted(MADE))
def test_what_a_stage_cannot_hand_on_is_refused_by_name(what: str, tmp_path: Path) -> None:
    """vllm-project/vllm#40786, sgl-project/sglang#25284: crashes on a rank, or states that are silently wrong."""
    model, config, more, text = MADE[what]
    if not hasattr(tf, model):
        pytest.skip(f"this transformers has no {model}")
    getattr(tf, model)(getattr(tf, config)(**{**SIZES, **more})).save_pretrained(tmp_path)
    with pytest.raises(NotSupportedError, match="cannot run on pipeline stages: " + text):
        check_split(describe_target(str(tmp_path)), pp=2, tp=1)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "gemma2", "gemma3", "moe", "hybrid"])
def test_families_that_hand_on_one_stream_are_taken(family: str) -> None:
    check_split(describe_target(str(make_tiny(family))), pp=2, tp=1)

"""The logits of a target are its head's products scaled and capped as its class does it, or decoding is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from fixtures.make import IDS, VOCAB_SIZE, fill, make_tiny, tokenizer
from specctl.core.decode import decode_here
from specctl.core.logits import LogitRule, logit_rule
from specctl.core.placement import Placement
from specctl.core.speculate import DecodeSettings, Request
from specctl.core.target import LoadedTarget, describe_target, load_target
from specctl.core.targetrows import TargetRows
from specctl.core.teaching import read_parts
from specctl.errors import NotSupportedError

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **IDS,
}
MADE = {
    "granite": lambda: tf.GraniteForCausalLM(tf.GraniteConfig(**SIZES, num_hidden_layers=3, logits_scaling=4.0)),
    "cohere": lambda: tf.CohereForCausalLM(tf.CohereConfig(**SIZES, num_hidden_layers=3, logit_scale=0.25)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**SIZES, num_hidden_layers=3, head_dim=8, final_logit_softcapping=2.0)
    ),
    "recurrent_gemma": lambda: tf.RecurrentGemmaForCausalLM(
        tf.RecurrentGemmaConfig(
            **SIZES, num_hidden_layers=3, lru_width=32, attention_window_size=8, logits_soft_cap=2.0
        )
    ),
}


def target_of(folder: Path) -> LoadedTarget:
    return load_target(describe_target(str(folder)), dtype="float32", device=CPU)


@pytest.mark.parametrize("name", sorted(MADE))
def test_decoding_and_training_make_the_logits_that_the_class_makes(name: str, tmp_path: Path) -> None:
    model: Any = MADE[name]()
    with torch.no_grad():
        fill(model, 0)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    target = target_of(tmp_path)
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        own = target.model(ids).logits[0]
        final = target.decoder.caller(ids).last_hidden_state[0]
        with TargetRows(target, (), Placement()) as rows:
            torch.testing.assert_close(rows.logits(final), own, rtol=1e-5, atol=1e-5)
        parts = read_parts(str(tmp_path))
        taught = LogitRule(parts.scale, 1.0, parts.softcap)(final @ parts.head.float().T)
        torch.testing.assert_close(taught, own, rtol=1e-4, atol=1e-5)
        assert (own - final @ parts.head.float().T).abs().max() > 0.05  # the rule does something here


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({}, LogitRule()),
        ({"logit_scale": 0.5}, LogitRule(factor=0.5)),
        ({"lm_head_multiplier": 2}, LogitRule(factor=2.0)),
        ({"output_multiplier": 0.25, "final_logit_softcapping": 20.0}, LogitRule(factor=0.25, cap=20.0)),
        ({"logits_scaling": 8}, LogitRule(divisor=8.0)),
        ({"logits_scaling": 8, "model_type": "hyperclovax"}, LogitRule(factor=8.0)),
        ({"hidden_size": 2560, "dim_model_base": 256}, LogitRule(divisor=10.0)),
        ({"hidden_size": 2560, "dim_model_base": 256, "logits_scaling": 10.0}, LogitRule(divisor=10.0)),
        ({"logits_mup_width_multiplier": 4}, LogitRule(divisor=4.0)),
        ({"final_logit_softcapping": None, "logits_soft_cap": 30.0}, LogitRule(cap=30.0)),
        ({"output_logit_soft_cap": 30.0, "logit_scale": None, "logits_scaling": "x"}, LogitRule(cap=30.0)),
    ],
)
def test_a_configuration_says_what_is_done_to_the_heads_products(config: dict[str, Any], rule: LogitRule) -> None:
    assert logit_rule(config) == rule


def test_logits_that_more_than_the_head_makes_are_refused_before_decoding() -> None:
    target = target_of(make_tiny("llama"))

    def sharpen(_model: Any, _args: Any, output: Any) -> Any:
        output.logits = output.logits * 1.5
        return output

    handle = target.model.register_forward_hook(sharpen)
    with pytest.raises(NotSupportedError, match="makes its logits by more than its head"):
        decode_here(target, None, [Request("a", (1, 2, 3))], settings=DecodeSettings(4))
    handle.remove()
    assert len(decode_here(target, None, [Request("a", (1, 2, 3))], settings=DecodeSettings(4))[0].tokens) == 4


def test_a_window_that_the_class_does_not_know_does_nothing(tmp_path: Path) -> None:
    """A `sliding_window` left over in the config.json of a Llama: transformers ignores it."""
    folder = tmp_path / "target"
    shutil.copytree(make_tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 8}))
    prompt = tuple(range(60, 100))
    expected = decode_here(target_of(make_tiny("llama")), None, [Request("a", prompt)], settings=DecodeSettings(8))
    found = decode_here(target_of(folder), None, [Request("a", prompt)], settings=DecodeSettings(8))
    assert found[0].tokens == expected[0].tokens


def test_a_configuration_that_asks_for_tuples_is_answered_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(make_tiny("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "return_dict": False}))
    found = decode_here(target_of(folder), None, [Request("a", (1, 2, 3))], settings=DecodeSettings(4))
    expected = decode_here(target_of(make_tiny("llama")), None, [Request("a", (1, 2, 3))], settings=DecodeSettings(4))
    assert found[0].tokens == expected[0].tokens

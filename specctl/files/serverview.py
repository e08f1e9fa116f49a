"""How the two servers read names and settings of a draft: prefixes, layouts, how ids are counted. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from specctl.records.runtimes import Runtime, Version
from specctl.records.target import TargetFacts

PREFIXES: Final = ("model.", "base_model.", "draft_model.", "eagle_module.", "module.")
WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP and activation checkpointing put anywhere into a name."""

PER_REQUEST: Final = "--per-request-spec-decode-metrics"
PER_REQUEST_SINCE: Final = (0, 29)
"""The option by which vLLM tells of each request's drafts, and its first release. Source: vllm-project/vllm#48915."""


def bare(name: str) -> str:
    """A tensor's name without what trainers and wrappers leave before it and in it."""
    for wrapper in WRAPPERS:
        if wrapper in name:
            name = name.replace(wrapper, "")
    while name.startswith(PREFIXES):
        name = name.split(".", 1)[1]
    return name


def canonical(name: str) -> str:
    """A tensor's bare name with `layers.0.` for `midlayer.`."""
    name = bare(name)
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def vllm_speculation(draft: str, tokens: int, *, is_parallel: bool) -> dict[str, Any]:
    """What `vllm serve --speculative-config` takes. Without the method vLLM guesses it from the folder's name."""
    settings: dict[str, Any] = {"method": "eagle3", "model": draft, "num_speculative_tokens": tokens}
    return {**settings, "parallel_drafting": True} if is_parallel else settings


def sglang_speculation(draft: str, tokens: int) -> list[str]:
    """The arguments of `sglang.launch_server` for chains of drafts. It counts the token before them as one."""
    names = ("algorithm", "draft-model-path", "num-steps", "eagle-topk", "num-draft-tokens")
    values = ("EAGLE3", draft, str(tokens), "1", str(tokens + 1))
    return [word for name, value in zip(names, values, strict=True) for word in (f"--speculative-{name}", value)]


def plain_settings(raw: Mapping[str, Any], runtime: Runtime) -> Mapping[str, Any]:
    eagle = raw.get("eagle_config")
    nested = eagle.get("norm_before_fc") if isinstance(eagle, Mapping) else None
    if runtime == "sglang" and raw.get("use_aux_norm") is True:
        raw = {**raw, "fc_norm": True}  # its older name there
    # vLLM lets the nested flag win over the top-level one.
    return raw if nested is None else {**raw, "norm_before_fc": nested}


def unfolded_settings(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """As vLLM's `update_eagle3` and `update_peagle` do (transformers_utils/configs/speculators/algos.py)."""
    layer = raw.get("transformer_layer_config")
    flat: dict[str, Any] = dict(layer) if isinstance(layer, Mapping) else {}
    is_peagle = raw.get("speculators_model_type") == "peagle"
    keys = ["draft_vocab_size", "target_hidden_size", "norm_before_fc", "eagle_aux_hidden_state_layer_ids"]
    keys += ["mask_token_id"] if is_peagle else ["fc_norm", "norm_output"]
    flat |= {key: raw[key] for key in keys if raw.get(key) is not None}
    flat["norm_before_residual"] = raw.get("norm_before_residual", not is_peagle)
    return flat


def sglang_boundaries(ids: list[int], target: TargetFacts | None) -> list[int]:
    """Boundaries of SGLang's nested ids: one more, but for two families of targets.

    Source: sglang 0.5.23 models/gpt_oss.py:1349, models/deepseek_v2.py:3470.
    """
    name = target.architecture if target is not None else ""
    if name == "GptOssForCausalLM" and target is not None and max(ids) == target.num_layers:
        return ids
    if name.startswith(("Deepseek", "Glm4MoeLite", "GlmMoeDsa")) and ids[0] != 1:
        return ids
    return [i + 1 for i in ids]


def are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def shape_text(shape: tuple[int, ...]) -> str:
    """`[4, 16]`."""
    return f"[{', '.join(map(str, shape))}]"


def brief(value: Any) -> str:
    """A value of config.json as it can stand in a sentence."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def release(version: Version) -> str:
    """`0.22`."""
    return ".".join(map(str, version))

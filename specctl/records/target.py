"""What is known of a target before its weights load. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TEXT_KEYS: Final = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A causal LM as its configuration describes it.

    `path` is the folder that was resolved; `text_prefix` the config key that the text settings were
    read from, empty where they are flat; `compute_dtype` the dtype that activations have, whatever
    the weights are stored in; `quantization` the method's name or None.
    """

    name: str
    path: str
    revision: str | None
    gguf_file: str | None
    architecture: str
    model_type: str
    text_prefix: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    compute_dtype: str
    quantization: str | None
    is_tied: bool
    config_hash: str
    weights_fingerprint: str
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a target's config says that a draft has to agree with. No weights, no torch.

    `rope` is flat (records/rope.py), None where nothing is said; `eos_token_ids` are those of
    config.json and generation_config.json.
    """

    name: str
    folder: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    rms_norm_eps: float | None
    rope: Mapping[str, Any] | None
    eos_token_ids: tuple[int, ...]
    is_tied: bool
    dtype: str | None
    is_multimodal: bool


def text_settings(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The part of a raw config that describes the text model, and the key it was under.

    A null or absent nested config falls back to the flat fields. Source: NVIDIA-NeMo/Automodel#3071.
    """
    for key in TEXT_KEYS:
        nested = config.get(key)
        if isinstance(nested, Mapping) and nested:
            inner, settings = text_settings(nested)
            return (f"{key}.{inner}".rstrip("."), settings)
    return "", config

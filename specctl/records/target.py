"""What is known of a target before its weights load. No torch."""

from dataclasses import dataclass


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

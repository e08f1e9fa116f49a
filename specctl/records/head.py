"""A draft head in canonical terms: the settings that decide what it computes, and the tensors it has.

Names are those of config.json as vLLM reads it. Source: vllm `models/llama_eagle3.py`, docs/design.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Block = Literal["llama", "qwen3"]
"""Which decoder layer the head is made of; a qwen3 one norms its queries and keys."""

LAYER_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
DEFAULT_AUX_COUNT: Final = 3

MAX_VOCABULARY: Final = 1 << 24
"""Tokens of the largest vocabulary whose maps are made or moved."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What a head is, whatever layout it lies in.

    `vocab_size` is the target's; `draft_vocab_size` equals it where the vocabulary is not reduced.
    `aux_ids` are boundary ids in the order of fc's columns, None where the checkpoint does not say.
    `rope` is flat with `rope_type` and `rope_theta`. `norm_output` is vLLM's: the state fed to the next
    step is the normed one. `extra` are keys that change nothing here and are carried along.
    """

    block: Block
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    num_aux: int
    aux_ids: tuple[int, ...] | None
    rms_norm_eps: float
    hidden_act: str
    rope: Mapping[str, Any]
    max_position_embeddings: int | None
    use_aux: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    parallel_drafting: bool = False
    mask_token_id: int | None = None
    num_draft_tokens: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    verifier: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_reduced(self) -> bool:
        """The draft proposes from a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def fc_width(self) -> int:
        """Columns of fc: the fused states side by side."""
        return self.num_aux * self.target_hidden_size


def layer_shapes(head: HeadConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """The tensors of draft layer `layer` by canonical name.

    Layer 0 attends over embedding and hidden state side by side, so its q, k and v take 2H.
    """
    hidden, inner = head.hidden_size, head.intermediate_size
    queries, keys = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    width = 2 * hidden if layer == 0 else hidden
    shapes: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in LAYER_NORMS}
    if layer == 0:
        shapes["hidden_norm.weight"] = (hidden,)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes |= {f"self_attn.{name}.weight": (size, width) for name, size in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if head.attention_bias:
        shapes |= {f"self_attn.{name}.bias": (size,) for name, size in rows.items()}
        if head.block == "llama":
            shapes["self_attn.o_proj.bias"] = (hidden,)
    if head.block == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (head.head_dim,) for name in "qk"}
    shapes |= {f"mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    if head.mlp_bias:
        shapes |= {f"mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")} | {"mlp.down_proj.bias": (hidden,)}
    return {f"layers.{layer}.{name}": shape for name, shape in shapes.items()}


def required_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the head cannot do without, by canonical name (layers always as `layers.N.`)."""
    shapes: dict[str, tuple[int, ...]] = {}
    if head.use_aux:
        shapes["fc.weight"] = (head.hidden_size, head.fc_width)
    if head.norm_before_fc:
        shapes["input_norm.weight"] = (head.fc_width,)
    if head.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (head.target_hidden_size,) for i in range(head.num_aux)}
    for layer in range(head.num_hidden_layers):
        shapes |= layer_shapes(head, layer)
    shapes["norm.weight"] = (head.hidden_size,)
    if head.is_reduced:
        shapes |= {"d2t": (head.draft_vocab_size,), "lm_head.weight": (head.draft_vocab_size, head.hidden_size)}
    if head.parallel_drafting:
        shapes["mask_hidden"] = (1, head.fc_width)
    return shapes


def optional_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a head may bring and that have one shape when it does."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (head.vocab_size, head.hidden_size),
        "t2d": (head.vocab_size,),
        "rotary_emb.inv_freq": (head.head_dim // 2,),
    }
    if not head.is_reduced:
        shapes["lm_head.weight"] = (head.draft_vocab_size, head.hidden_size)
    for layer in range(1, head.num_hidden_layers):
        shapes[f"layers.{layer}.hidden_norm.weight"] = (head.hidden_size,)
    return shapes

"""Draft heads as real files, written and run by hand: names and forward pass of each layout, none of specctl's tables.

Legend: T tokens, A states fused, H draft width, D draft vocabulary, V target's.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

VOCAB, DEPTH = 24, 12
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Plan:
    """What a head is made of; the defaults are those that every layout can hold."""

    layers: int = 1
    num_aux: int = 3
    ids: tuple[int, ...] | None = (2, 6, 9)
    hidden: int = 8
    target_hidden: int = 8
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 6
    draft_vocab: int = 10
    flags: tuple[str, ...] = ()
    qwen3: bool = False
    parallel: bool = False
    own_embedding: bool = False
    own_head: bool = True
    dtype: str = "bfloat16"
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    num_draft_tokens: int | None = 4
    verifier: str | None = "owner/target"
    eos: Any = 3
    extra: dict[str, Any] = field(default_factory=lambda: {"initializer_range": 0.02})
    seed: int = 0


def draft_ids(plan: Plan) -> list[int]:
    """The target ids of the draft's rows, rising."""
    rng = np.random.default_rng(plan.seed + 1)
    return sorted(rng.choice(VOCAB, plan.draft_vocab, replace=False).tolist())


def tensors_of(plan: Plan) -> dict[str, torch.Tensor]:
    """The tensors by their names in vLLM, layers as `layers.N.`."""
    h, inner, queries, keys = plan.hidden, 12, plan.heads * plan.head_dim, plan.kv_heads * plan.head_dim
    width = plan.num_aux * plan.target_hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, width), "norm.weight": (h,)}
    for i in range(plan.layers):
        at, wide = f"layers.{i}.", 2 * h if i == 0 else h
        shapes |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,)}
        shapes |= {at + "hidden_norm.weight": (h,)} if i == 0 else {}
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, wide)
            if "attention_bias" in plan.flags:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
        shapes[at + "self_attn.o_proj.weight"] = (h, queries)
        if "attention_bias" in plan.flags and not plan.qwen3:
            shapes[at + "self_attn.o_proj.bias"] = (h,)
        if plan.qwen3:
            shapes |= {at + f"self_attn.{n}_norm.weight": (plan.head_dim,) for n in "qk"}
        for name, shape in (("gate", (inner, h)), ("up", (inner, h)), ("down", (h, inner))):
            shapes[f"{at}mlp.{name}_proj.weight"] = shape
            if "mlp_bias" in plan.flags:
                shapes[f"{at}mlp.{name}_proj.bias"] = shape[:1]
    shapes |= {"input_norm.weight": (width,)} if "norm_before_fc" in plan.flags else {}
    if "fc_norm" in plan.flags:
        shapes |= {f"fc_norm.{i}.weight": (plan.target_hidden,) for i in range(plan.num_aux)}
    shapes |= {"mask_hidden": (1, width)} if plan.parallel else {}
    shapes |= {"lm_head.weight": (plan.draft_vocab, h)} if plan.own_head else {}
    shapes |= {"embed_tokens.weight": (VOCAB, h)} if plan.own_embedding else {}
    generator = torch.Generator().manual_seed(plan.seed)
    dtype = DTYPES[plan.dtype]
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if plan.draft_vocab < VOCAB:
        ids = torch.tensor(draft_ids(plan))
        made["d2t"] = ids - torch.arange(len(ids))
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return made


def config_of(plan: Plan) -> dict[str, Any]:
    """config.json as vLLM reads it."""
    scaling = {key: value for key, value in plan.rope.items() if key != "rope_theta"}
    config: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if plan.qwen3 else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if plan.qwen3 else "llama",
        "hidden_size": plan.hidden,
        "intermediate_size": 12,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "head_dim": plan.head_dim,
        "vocab_size": VOCAB,
        "draft_vocab_size": plan.draft_vocab,
        "target_hidden_size": plan.target_hidden,
        "num_aux_hidden_states": plan.num_aux,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rope_parameters": plan.rope,
        "rope_theta": plan.rope["rope_theta"],
        "rope_scaling": scaling if plan.rope["rope_type"] != "default" else None,
        "eos_token_id": plan.eos,
        "bos_token_id": 1,
        "torch_dtype": plan.dtype,
        "tie_word_embeddings": False,
        **dict.fromkeys(plan.flags, True),
        **plan.extra,
    }
    if plan.ids is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(plan.ids)
    if plan.parallel:
        config |= {"mask_token_id": 5, "parallel_drafting": True}
    if plan.num_draft_tokens is not None:
        config["num_draft_tokens"] = plan.num_draft_tokens
    if plan.verifier is not None:
        config["verifier"] = plan.verifier
    return config


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder with one weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make(folder: Path, plan: Plan) -> Path:
    """A head in vLLM's layout."""
    tensors = tensors_of(plan)
    if plan.layers == 1:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return save(folder, config_of(plan), tensors)


def make_target(folder: Path, hidden: int = 8, dtype: str = "bfloat16", **more: Any) -> Path:
    """A target's folder with its two tables; 12 layers by name only."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": DEPTH,
        "hidden_size": hidden,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **more,
    }
    generator = torch.Generator().manual_seed(99)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    tables = {n: torch.randn(VOCAB, hidden, generator=generator).to(DTYPES[dtype]) for n in names}
    return save(folder, config, tables)


def by_vllm_name(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder of any layout by vLLM's names, by plain text rules."""
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        found[name] = tensor.reshape(1, -1) if name == "mask_hidden" else tensor
    return found


def settings_of(folder: Path) -> dict[str, Any]:
    """config.json with the layer's settings beside the head's."""
    config = json.loads((folder / "config.json").read_text())
    return {**config.get("transformer_layer_config", {}), **config}


def logits(folder: Path, states_LTH: torch.Tensor, tokens_T: torch.Tensor, target: Path) -> torch.Tensor:
    """What the head in `folder` says, float64 [T, V], given the target's states in the order of its own columns.

    One step over T tokens, as vLLM's llama_eagle3.py computes it.
    """
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in by_vllm_name(folder).items()}
    config = settings_of(folder)
    tables = load_file(target / "model.safetensors")
    embedding = tensors.get("embed_tokens.weight", tables["model.embed_tokens.weight"].double())
    head = tensors.get("lm_head.weight", tables["lm_head.weight"].double())
    hidden = _fused(tensors, config, states_LTH.double())
    residual = None
    embeds = embedding[tokens_T]
    for i in range(sum(name.endswith("input_layernorm.weight") for name in tensors)):
        at = f"layers.{i}."
        if i == 0:
            normed = _norm(hidden, tensors[at + "hidden_norm.weight"])
            residual = normed if config.get("norm_before_residual") else hidden
            joined = torch.cat([_norm(embeds, tensors[at + "input_layernorm.weight"]), normed], -1)
        else:
            residual, joined = hidden, _norm(hidden, tensors[at + "input_layernorm.weight"])
        hidden = residual + _attention(tensors, at, config, joined)
        hidden = hidden + _mlp(tensors, at, _norm(hidden, tensors[at + "post_attention_layernorm.weight"]))
    # Sums row by row, so that a row's place in the table cannot change its bits.
    scores = (_norm(hidden, tensors["norm.weight"])[:, None, :] * head).sum(-1)
    targets = torch.arange(scores.shape[1]) + tensors.get("d2t", torch.zeros(scores.shape[1], dtype=torch.int64))
    out = torch.full((len(tokens_T), VOCAB), -torch.inf, dtype=torch.float64)
    out[:, targets] = scores
    return out


def _fused(tensors: dict[str, torch.Tensor], config: dict[str, Any], states_LTH: torch.Tensor) -> torch.Tensor:
    if config.get("fc_norm"):
        states_LTH = torch.stack([_norm(s, tensors[f"fc_norm.{i}.weight"]) for i, s in enumerate(states_LTH)])
    joined = torch.cat(list(states_LTH), -1)
    if config.get("norm_before_fc"):
        joined = _norm(joined, tensors["input_norm.weight"])
    return joined @ tensors["fc.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _linear(tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    out = x @ tensors[f"{name}.weight"].T
    return out + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else out


def _attention(tensors: dict[str, torch.Tensor], at: str, config: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    size, count = config["head_dim"], len(x)
    q, k, v = (_linear(tensors, f"{at}self_attn.{n}_proj", x).view(count, -1, size).transpose(0, 1) for n in "qkv")
    if f"{at}self_attn.q_norm.weight" in tensors:
        q, k = _norm(q, tensors[f"{at}self_attn.q_norm.weight"]), _norm(k, tensors[f"{at}self_attn.k_norm.weight"])
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    q, k = (_rotated(part, float(theta)) for part in (q, k))
    k, v = (part.repeat_interleave(len(q) // len(part), 0) for part in (k, v))
    scores = (q @ k.transpose(1, 2) / size**0.5).masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
    return _linear(tensors, f"{at}self_attn.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1))


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


def _mlp(tensors: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> torch.Tensor:
    gate = torch.nn.functional.silu(_linear(tensors, f"{at}mlp.gate_proj", x))
    return _linear(tensors, f"{at}mlp.down_proj", gate * _linear(tensors, f"{at}mlp.up_proj", x))

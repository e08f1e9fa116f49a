"""The rope scaling that a GGUF file states, as a transformers configuration holds it. Knows no weights.

transformers reads the base of the rotations from GGUF and leaves their scaling aside, so that every state of
such a target would be wrong. Scaling is in keys, `<arch>.rope.scaling.*`, and in three tensors that divide the
frequencies: `rope_freqs.weight` (Llama 3), `rope_factors_long.weight` and `rope_factors_short.weight` (Phi-3).
Source: llama.cpp, convert_hf_to_gguf.py, which writes them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specctl.errors import TargetError

FREQS: Final = "rope_freqs.weight"
LONG: Final = "rope_factors_long.weight"
SHORT: Final = "rope_factors_short.weight"
READ: Final = frozenset(
    [
        "type",
        "factor",
        "original_context_length",
        "attn_factor",
        "yarn_attn_factor",
        "yarn_ext_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_log_multiplier",
        "finetuned",
    ]
)
NEUTRAL: Final = {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
"""Keys that transformers has no parameter for, with the value that changes nothing."""

LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINALS: Final = (8192, *(2**k for k in range(6, 21)))
TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class GgufRope:
    """What a file says of its rope: `scaling` by the end of the key, `divisors` float32 [R/2] by tensor name."""

    path: Path
    arch: str
    scaling: Mapping[str, Any]
    divisors: Mapping[str, NDArray[np.float32]]

    def key(self, name: str) -> str:
        """The whole key."""
        return f"{self.arch}.rope.scaling.{name}"

    def refusal(self, what: str, found: str) -> TargetError:
        """The error for `what`, a key or a tensor, that has no place in a transformers configuration."""
        return TargetError(
            f"`{what}` of this GGUF file {found}",
            where=str(self.path),
            hint="use the original safetensors checkpoint: its config.json says how rope is scaled",
        )


def put_rope(config: Any, gguf: Path) -> None:
    """Write the rope scaling of a GGUF file into the configuration that transformers made of it.

    Raises TargetError that names the key or tensor which transformers' configurations cannot express.
    """
    rope = read_rope(gguf)
    scaled = _scaling(rope, config)
    if scaled:
        _put(config, scaled, rope)
    if FREQS in rope.divisors:
        _put_divisors(config, rope)


def read_rope(gguf: Path) -> GgufRope:
    """What the file says of its rope. Raises TargetError for a key that this specctl does not know."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(str(gguf))
    arch = str(reader.fields["general.architecture"].contents())
    prefix = f"{arch}.rope.scaling."
    scaling = {k.removeprefix(prefix): f.contents() for k, f in reader.fields.items() if k.startswith(prefix)}
    if (old := reader.fields.get(f"{arch}.rope.scale_linear")) is not None:  # before keys for other kinds
        scaling.setdefault("factor", old.contents())
    tensors = {t.name: t for t in reader.tensors if t.name in (FREQS, LONG, SHORT)}
    divisors = {name: np.array(dequantize(t.data, t.tensor_type), np.float32) for name, t in tensors.items()}
    rope = GgufRope(gguf, arch, scaling, divisors)
    for name, value in scaling.items():
        if name not in READ:
            raise rope.refusal(rope.key(name), f"is {value!r}, and is no key that specctl knows")
    return rope


def _scaling(rope: GgufRope, config: Any) -> dict[str, Any]:
    """The parameters that the keys stand for; none where nothing is scaled."""
    factor = float(rope.scaling.get("factor") or 1.0)
    kind = str(rope.scaling.get("type") or _unsaid(rope, factor)).lower()
    if kind == "none" or (kind in ("linear", "yarn") and factor == 1.0):
        return {}
    for name, neutral in NEUTRAL.items():
        if name in rope.scaling and float(rope.scaling[name]) != neutral:
            raise rope.refusal(rope.key(name), f"is {rope.scaling[name]:g}; transformers knows {neutral:g} alone")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(rope, factor)
    if kind == "longrope":
        return _longrope(rope, config)
    raise rope.refusal(rope.key("type"), f"is {kind!r}; specctl reads none, linear, yarn and longrope")


def _unsaid(rope: GgufRope, factor: float) -> str:
    """The kind of scaling where no key says it, as with Phi-3, which is told by its tensors."""
    if LONG in rope.divisors or SHORT in rope.divisors:
        return "longrope"
    return "linear" if factor != 1.0 else "none"


def _yarn(rope: GgufRope, factor: float) -> dict[str, Any]:
    usual = 1.0 + 0.1 * math.log(factor)
    for name in ("attn_factor", "yarn_attn_factor"):
        # Some writers mean the attention's whole factor, others what the usual one is multiplied by.
        if name in rope.scaling and abs(float(rope.scaling[name]) - usual) > TOLERANCE:
            raise rope.refusal(
                rope.key(name),
                f"is {rope.scaling[name]:g}, which writers use in two senses; yarn by {factor:g} has {usual:.4g}",
            )
    betas = {k: float(rope.scaling[f"yarn_{k}"]) for k in ("beta_fast", "beta_slow") if f"yarn_{k}" in rope.scaling}
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": _original(rope), **betas}
    # The key for it is not in the format, and gpt-oss is the one model whose range is not rounded.
    return found | ({"truncate": False} if rope.arch == "gpt-oss" else {})


def _longrope(rope: GgufRope, config: Any) -> dict[str, Any]:
    for name in (LONG, SHORT):
        if name not in rope.divisors:
            raise rope.refusal(name, "is missing, and its rope is scaled by longrope")
    original = _original(rope)
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [float(x) for x in rope.divisors[LONG]],
        "short_factor": [float(x) for x in rope.divisors[SHORT]],
        "original_max_position_embeddings": original,
        "factor": config.max_position_embeddings / original,
    }
    if "attn_factor" in rope.scaling:
        found["attention_factor"] = float(rope.scaling["attn_factor"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = 2 * len(found["short_factor"])
    if turned != head_dim and config.model_type != "phi3":
        raise rope.refusal(SHORT, f"is for {turned} rotated values of a head, and the head has {head_dim}")
    return found | ({"partial_rotary_factor": turned / head_dim} if turned != head_dim else {})


def _original(rope: GgufRope) -> int:
    if not rope.scaling.get("original_context_length"):
        raise rope.refusal(rope.key("original_context_length"), "is missing, and its kind of scaling needs it")
    return int(rope.scaling["original_context_length"])


def _put(config: Any, scaled: Mapping[str, Any], rope: GgufRope) -> None:
    old = getattr(config, "rope_parameters", None)
    if not old:
        raise rope.refusal(rope.key("type"), f"scales rope, and `{config.model_type}` has none in transformers")
    theta = {"rope_theta": _theta(old)}
    if not _is_nested(old):
        config.rope_parameters = {**theta, **scaled}
    elif config.model_type == "gemma3_text":  # its sliding layers are never scaled
        config.rope_parameters = {**old, "full_attention": {**theta, **scaled}}
    else:
        raise rope.refusal(rope.key("type"), "does not say which kinds of layers it scales")
    if hasattr(config, "original_max_position_embeddings") and "original_max_position_embeddings" in scaled:
        config.original_max_position_embeddings = scaled["original_max_position_embeddings"]  # wins with Phi-3


def _put_divisors(config: Any, rope: GgufRope) -> None:
    """Find the parameters whose frequencies are those that `rope_freqs.weight` leads to."""
    divisors = rope.divisors[FREQS].astype(np.float64)
    old = getattr(config, "rope_parameters", None)
    if not old:
        raise rope.refusal(FREQS, f"divides rope frequencies, and `{config.model_type}` has none in transformers")
    theta, size = _theta(old), len(divisors)
    wanted = theta ** -(np.arange(size) / size) / divisors
    if _gap(config, wanted) <= TOLERANCE:
        return
    factor = float(divisors.max())
    factor = float(round(factor)) if abs(factor - round(factor)) < 1e-4 else factor
    tried = [
        {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **LLAMA3, "original_max_position_embeddings": n}
        for n in ORIGINALS
    ]
    is_plain = not _is_nested(old) and old.get("rope_type", "default") == "default" and factor > 1.0
    gaps = [_gap(_with(config, parameters), wanted) for parameters in tried] if is_plain else [math.inf]
    if min(gaps) > TOLERANCE:
        raise rope.refusal(
            FREQS,
            f"divides frequencies by {divisors.min():g} to {divisors.max():g} in a way that is not Llama 3's, "
            "and transformers does not read it",
        )
    config.rope_parameters = tried[gaps.index(min(gaps))]


def _gap(config: Any, wanted: NDArray[np.float64]) -> float:
    """The largest relative difference of the frequencies that `config` gives from `wanted`, [R/2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    layer = "full_attention" if _is_nested(parameters) else None
    kind = (parameters[layer] if layer else parameters).get("rope_type", "default")
    if kind == "default":
        found = _theta(parameters) ** -(np.arange(len(wanted)) / len(wanted))
    else:
        tensor, _ = ROPE_INIT_FUNCTIONS[kind](copy.deepcopy(config), layer_type=layer)
        found = tensor.double().numpy()
    if len(found) != len(wanted):
        return math.inf
    return float((np.abs(found - wanted) / np.maximum(wanted, 1e-12)).max())


def _with(config: Any, parameters: Mapping[str, Any]) -> Any:
    other = copy.deepcopy(config)
    other.rope_parameters = dict(parameters)
    return other


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in parameters.values())


def _theta(parameters: Mapping[str, Any]) -> float:
    """The base of the rotations; of layers that see everything where kinds of layers differ."""
    inner = parameters.get("full_attention", {}) if _is_nested(parameters) else parameters
    return float(inner["rope_theta"])

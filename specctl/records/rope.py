"""Rotary settings: the two spellings of config.json, and the one flat form specctl uses. No torch.

transformers 5 moved `rope_theta` and `rope_scaling` into `rope_parameters`; readers that know one
spelling fall back to theta 10000 without a word (NVIDIA-NeMo/Automodel#2920).
"""

import math
from collections.abc import Mapping
from typing import Any, Final

MULTIMODAL: Final = ("mrope_section", "mrope_interleaved")
"""Their presence alone switches M-RoPE on in vLLM (vllm-project/speculators#598)."""

MAX_FREQUENCIES: Final = 65_536
"""Far above any head; beyond it the numbers are not worth their memory."""

ORIGINAL: Final = "original_max_position_embeddings"
FROM_LENGTH: Final = ("yarn", "longrope", "dynamic")
"""Kinds of rope that take `max_position_embeddings` for the length before scaling where they do not say it."""

_SCALED: Final[Mapping[str, Mapping[str, float | None]]] = {
    "default": {},
    "dynamic": {},
    "linear": {"factor": None},
    "llama3": dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32.0, "beta_slow": 1.0},
}
"""Kinds of rope whose frequencies follow from its own numbers, those numbers, and what stands for an absent one."""

_ATTENTION_KINDS: Final = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def is_per_attention_kind(parameters: Any) -> bool:
    """Whether `rope_parameters` is one dict per kind of attention instead of one flat dict."""
    return isinstance(parameters, Mapping) and any(
        isinstance(value, Mapping) and (kind in _ATTENTION_KINDS or "rope_theta" in value or "rope_type" in value)
        for kind, value in parameters.items()
    )


def old_spelling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The flat form of top-level `rope_theta` and `rope_scaling`; None where neither says anything."""
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling")
    if theta is None and not isinstance(scaling, Mapping):
        return None
    return _flat(
        {**(scaling if isinstance(scaling, Mapping) else {}), **({} if theta is None else {"rope_theta": theta})}
    )


def new_spelling(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any] | None:
    """The flat form of `rope_parameters`; of its entry for attention `kind` where it has one per kind.

    None where there is none, or where `kind` is needed and not given or not there.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return None
    if is_per_attention_kind(parameters):
        chosen = parameters.get(kind) if kind is not None else None
        return _flat(chosen) if isinstance(chosen, Mapping) else None
    return _flat(parameters)


def rope_of(config: Mapping[str, Any], kind: str | None = None) -> dict[str, Any] | None:
    """The flat form, from whichever spelling there is; the new one wins as it does in transformers 5."""
    new, old = new_spelling(config, kind), old_spelling(config)
    if new is None or old is None:
        return new if old is None else old
    return {**old, **new}


def both_spellings(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json that say `rope` to old and new readers alike."""
    keys: dict[str, Any] = {"rope_parameters": dict(rope), "rope_theta": rope["rope_theta"]}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    keys["rope_scaling"] = scaling if rope["rope_type"] != "default" else None
    return keys


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings in which two flat forms differ, sorted."""
    return tuple(sorted(key for key in {*one, *other} if one.get(key) != other.get(key)))


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int, *, limit: int = MAX_FREQUENCIES) -> list[float] | None:
    """inv_freq [head_dim / 2] as the modules of transformers begin with them, in float64.

    None for longrope, which has two sets, for a yarn that leaves its first length to another key, for a rope that
    turns a part of the head, for more than `limit` numbers, and where one of them leaves float64: the settings
    are foreign, and a base of 10**400 or a head of 2e8 numbers is no rope.
    Source: transformers 5.24 `modeling_rope_utils.py`.
    """
    kind = rope["rope_type"]
    if kind not in _SCALED or head_dim // 2 > limit or rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        return None
    numbers = {key: rope.get(key, default) for key, default in {"rope_theta": None, **_SCALED[kind]}.items()}
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in numbers.values()):
        return None
    try:
        base = float(numbers["rope_theta"])
        plain = [base ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        found = _scaled(plain, kind, {key: float(value) for key, value in numbers.items()}, rope)
    except (OverflowError, ZeroDivisionError, ValueError):
        return None
    return found if all(0 < value < math.inf for value in found) else None


def _scaled(plain: list[float], kind: str, numbers: Mapping[str, float], rope: Mapping[str, Any]) -> list[float]:
    if kind == "linear":
        return [value / numbers["factor"] for value in plain]
    if kind == "llama3":
        return [_of_llama3(value, numbers) for value in plain]
    if kind == "yarn":
        return _of_yarn(plain, numbers, is_whole=rope.get("truncate", True))
    return plain  # a dynamic one is scaled beyond its length alone


def _of_llama3(value: float, numbers: Mapping[str, float]) -> float:
    low, high, factor = numbers["low_freq_factor"], numbers["high_freq_factor"], numbers["factor"]
    turns = numbers["original_max_position_embeddings"] * value / (2 * math.pi)
    if turns < low:
        return value / factor
    if turns > high:
        return value
    share = (turns - low) / (high - low)
    return (1 - share) * value / factor + share * value


def _of_yarn(plain: list[float], numbers: Mapping[str, float], *, is_whole: Any) -> list[float]:
    size = 2 * len(plain)

    def index_of(turns: float) -> float:
        length = numbers["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(numbers["rope_theta"]))

    low, high = index_of(numbers["beta_fast"]), index_of(numbers["beta_slow"])
    if is_whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low if high != low else 0.001
    ramps = (min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain)))
    return [v / numbers["factor"] * r + v * (1 - r) for v, r in zip(plain, ramps, strict=True)]


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in settings.items() if key != "type" and key not in MULTIMODAL}
    kind = settings.get("rope_type", settings.get("type"))
    # A multimodal target's rope is the plain one for text: its sections all get the same position.
    flat["rope_type"] = "default" if kind in (None, "mrope") else kind
    return flat

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
    """inv_freq [head_dim / 2] of an unscaled or linearly scaled rope, in float64.

    None for other kinds, for more than `limit` numbers, and where one of them leaves float64: the settings
    are foreign, and a base of 10**400 or a head of 2e8 numbers is no rope.
    """
    if rope["rope_type"] not in ("default", "linear") or head_dim // 2 > limit:
        return None
    theta: Any = rope["rope_theta"]
    factor: Any = rope.get("factor") if rope["rope_type"] == "linear" else 1.0
    if not all(isinstance(value, int | float) and value > 0 for value in (theta, factor)):
        return None
    try:
        found = [float(theta) ** (-2 * i / head_dim) / float(factor) for i in range(head_dim // 2)]
    except OverflowError:
        return None
    return found if all(0 < value < math.inf for value in found) else None


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in settings.items() if key != "type" and key not in MULTIMODAL}
    kind = settings.get("rope_type", settings.get("type"))
    # A multimodal target's rope is the plain one for text: its sections all get the same position.
    flat["rope_type"] = "default" if kind in (None, "mrope") else kind
    return flat

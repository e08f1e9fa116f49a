"""Trainers that take rope base 10000 whatever config.json says. Knows settings, not layouts.

Source: EAGLE `eagle/traineagle3/cnets.py`, angelslim 0.5.0 `train/models/draft/llama_eagle3.py:257-286`
(published heads accept more at 10000 than at the base they state: wejoncy/sfllm#32).
"""

from typing import Any, Final

from specctl.records.rope import MULTIMODAL, rope_of

TRAINED_THETA: Final = 10000.0
_IGNORES: Final = ("default", "linear", "dynamic")


def at_trained_theta(settings: dict[str, Any], title: str) -> list[str]:
    """Put the base that was trained with in place of the stated one; says so where they differ.

    A multimodal rope is the one whose base both honour (AngelSlim's `mrope`).
    """
    parts = [settings.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    is_multimodal = any(part.get(key) for part in parts for key in MULTIMODAL)
    rope = rope_of(settings) or {"rope_type": "default"}
    stated = rope.get("rope_theta")
    if is_multimodal or rope["rope_type"] not in _IGNORES:
        return []
    settings["rope_parameters"] = {**rope, "rope_theta": TRAINED_THETA}
    settings["rope_theta"], settings["rope_scaling"] = TRAINED_THETA, None
    if stated == TRAINED_THETA:
        return []
    found = "says nothing" if stated is None else f"says {stated}"
    return [f"`rope_theta` is 10000, with which {title} trains whatever config.json says; it {found}"]

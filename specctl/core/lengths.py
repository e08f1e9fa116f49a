"""Rotary embeddings that depend on how long the longest row of a batch is, and what keeps rows apart for them.

`dynamic` frequencies grow with the longest row and are kept after it; `longrope` has two sets, for rows up to its
border and beyond. Rows that share a batch share the frequencies, so a sample's states would depend on its
neighbours and on what was read before (huggingface/transformers#25104). Source: transformers 5.24
`modeling_rope_utils.py`, `dynamic_rope_update`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from specctl.records.target import text_settings

TWO_SETS = ("longrope", "su")
"""What configs call it; the second in the first Phi-3 checkpoints."""


@dataclass(frozen=True, slots=True)
class LengthRule:
    """Rows up to `border` tokens and longer ones do not share a batch; `is_graded`: longer ones only with equals."""

    border: int
    is_graded: bool

    def parts(self, longest: int, length: int) -> bool:
        """Whether a row of `length` tokens must not be in a batch whose longest has `longest`."""
        if longest <= self.border:
            return False
        return length <= self.border or (self.is_graded and length != longest)


def length_rule(folder: str) -> LengthRule | None:
    """The rule of the target in a folder, by its config.json; None where rows do not touch each other."""
    _, text = text_settings(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    said = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(said, Mapping):
        return None
    nested = [part for part in said.values() if isinstance(part, Mapping)]
    rules = [rule for part in (nested or [said]) if (rule := _rule(part, text)) is not None]
    # Of several kinds of layers the strictest: nothing is wrong with smaller batches.
    return min(rules, key=lambda rule: (not rule.is_graded, rule.border), default=None)


def _rule(rope: Mapping[str, Any], text: Mapping[str, Any]) -> LengthRule | None:
    kind, longest = str(rope.get("rope_type") or rope.get("type")), text.get("max_position_embeddings")
    if "dynamic" in kind and isinstance(longest, int):
        return LengthRule(longest, is_graded=True)
    key = "original_max_position_embeddings"
    border = rope.get(key) or text.get(key) or longest
    if kind in TWO_SETS and isinstance(border, int):
        return LengthRule(border, is_graded=False)
    return None


def forget_lengths(model: nn.Module) -> None:
    """Put `dynamic` frequencies back to what they were before any row was read."""
    config: Any = getattr(model, "config", None)
    rope = None if config is None else getattr(config.get_text_config(), "rope_parameters", None)
    if "dynamic" not in str(rope):
        return
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        first = getattr(module, "original_max_seq_len", None)
        if first is None or kinds is None:
            continue
        prefixes = {f"{layer}_": kind for layer, kind in kinds.items()} if isinstance(kinds, Mapping) else {"": kinds}
        for prefix, kind in prefixes.items():
            before = getattr(module, f"{prefix}original_inv_freq", None)
            if "dynamic" in str(kind) and before is not None:
                setattr(module, f"{prefix}inv_freq", before.to(getattr(module, f"{prefix}inv_freq").device))
                setattr(module, f"{prefix}max_seq_len_cached", first)

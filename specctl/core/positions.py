"""How many positions a target has, and whether there is one after the last. Knows no samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from specctl.core.target import empty_model
from specctl.records.target import TargetSpec

OFFSETS: Final = 8
"""Rows that a table may hold beyond the positions: OPT's has two."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The number that the target's configuration names. With `is_table` nothing is there past the last one;
    otherwise, as with rope, positions go on where the model was not trained.
    """

    count: int
    is_table: bool


def max_positions(spec: TargetSpec, *, trust_remote_code: bool = False) -> int | None:
    """The number of positions in the target's files, by whatever name; None where they name none."""
    count = getattr(_text_config(spec, trust_remote_code), "max_position_embeddings", None)
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def read_positions(spec: TargetSpec, asked: int, *, trust_remote_code: bool = False) -> Positions | None:
    """The target's positions where they are fewer than `asked`, else None.

    Raises TargetError when the target's modules cannot be built.
    """
    count = max_positions(spec, trust_remote_code=trust_remote_code)
    if count is None or count >= asked:
        return None
    config = _text_config(spec, trust_remote_code)
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None):
        return Positions(count, is_table=False)
    return Positions(count, is_table=_has_table(empty_model(spec, trust_remote_code=trust_remote_code), count))


def _text_config(spec: TargetSpec, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(spec.path, trust_remote_code=trust_remote_code).get_text_config()


def _has_table(model: Any, count: int) -> bool:
    """Whether some embedding other than that of tokens, or some buffer, has a row for each position."""
    try:
        words = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # a model's own code need not say
        words = None
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [buffer for buffer in model.buffers() if buffer.dim() == 2]
    return any(count <= len(table) <= count + OFFSETS for table in tables)

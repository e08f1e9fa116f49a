"""A draft head on its way from one layout to another: canonical settings, and where each tensor lies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specctl.files.tensors import Source, TensorEntry
from specctl.records.head import HeadConfig
from specctl.records.target import TargetFacts

Convention = Literal["boundary", "output"]
"""What a layer id counts: the stream after that many layers, or the output of that layer from 0."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user says where a checkpoint does not.

    `aux_ids` are boundary ids; `convention` says how the source's own ids count; `norm_output` and
    `norm_before_residual` have vLLM's meaning. `embedding` and `lm_head` are the target's tables.
    """

    convention: Convention | None = None
    aux_ids: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    mask_token_id: int | None = None
    num_draft_tokens: int | None = None
    target: TargetFacts | None = None
    embedding: TensorEntry | None = None
    lm_head: TensorEntry | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Canonical settings, and the tensors by canonical name (layers always as `layers.N.`).

    d2t is int64 offsets and t2d its bool mask, both there iff the vocabulary is reduced. `notes` are
    sentences for the report: what was sorted, made or dropped on the way in.
    """

    config: HeadConfig
    tensors: Mapping[str, Source]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """A head as a layout spells it: config.json and the tensors by the names of the file."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Source]
    canonical: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

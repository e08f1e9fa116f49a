"""What a layout can say, as data, and the refusal of what it cannot. Knows no layout."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specctl.errors import NotSupportedError, UsageError
from specctl.files.head import Asked
from specctl.records.head import HeadConfig
from specctl.records.layers import aux_boundaries, is_deep_enough

ANY_HOLDER = "`--to vllm` holds it"
"""The canonical layout says everything that canonical terms do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holds:
    """What the readers of one layout honour. The defaults are those of the narrowest.

    `layers` and `aux_count` are the most and the exact number, None for any. `embedding` is `any`, or
    `needed`, or one that readers replace by the target's: `wider` keeps it where the widths differ,
    `never` has none. `rope_theta` is the one base that readers use. `instead` says for a key what to
    do, where that is not to take the canonical layout.
    """

    title: str
    layers: int | None = 1
    aux_count: int | None = 3
    default_aux_only: bool = False
    boundary_zero: bool = False
    last_boundary: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qwen3: bool = False
    parallel: bool = False
    without_fc: bool = False
    square_fc: bool = True
    other_width: bool = False
    window: bool = False
    rope_types: frozenset[str] | None = None
    rope_theta: float | None = None
    embedding: Literal["any", "needed", "wider", "never"] = "any"
    lm_head: Literal["any", "needed"] = "needed"
    instead: Mapping[str, str] = field(default_factory=dict)


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")


def require(head: HeadConfig, holds: Holds, asked: Asked) -> None:
    """Raises NotSupportedError for the first setting of `head` that the layout cannot hold, naming its key.

    Raises UsageError where that takes the target, which is not given.
    """
    for key, found, can in _misfits(head, holds):
        raise NotSupportedError(
            f"{holds.title} cannot hold `{key}` {found}; {can}", hint=holds.instead.get(key, ANY_HOLDER)
        )
    _require_layers(head, holds, asked)


def _misfits(head: HeadConfig, holds: Holds) -> Iterator[tuple[str, str, str]]:
    """The key, what the head has, and what the layout can do."""
    if head.parallel_drafting and not holds.parallel:
        yield "parallel_drafting", "true", "it has no P-EAGLE heads"
    for key in FLAGS:
        if getattr(head, key) and not getattr(holds, key):
            yield key, "true", "its readers have none and would drop it"
    if holds.layers is not None and head.num_hidden_layers > holds.layers:
        yield "num_hidden_layers", str(head.num_hidden_layers), f"its heads have {holds.layers}"
    if head.block == "qwen3" and not holds.qwen3:
        yield "architectures", "of a Qwen3 layer", "its heads are Llama layers, without norms on queries and keys"
    if not head.use_aux and not holds.without_fc:
        yield "use_aux_hidden_state", "false", "its heads always fuse states"
    if head.use_aux and holds.aux_count not in (None, head.num_aux):
        yield "num_aux_hidden_states", str(head.num_aux), f"its heads fuse exactly {holds.aux_count}"
    if head.use_aux and head.fc_width == head.hidden_size and not holds.square_fc:
        yield "num_aux_hidden_states", str(head.num_aux), "its readers skip an fc that is as wide as it is high"
    if head.target_hidden_size != head.hidden_size and not holds.other_width:
        yield "target_hidden_size", str(head.target_hidden_size), f"it has the draft's own width ({head.hidden_size})"
    if head.layer_types is not None and not holds.window:
        yield "layer_types", "with sliding_attention", "its readers attend fully"
    yield from _rope_misfits(head, holds)


def _rope_misfits(head: HeadConfig, holds: Holds) -> Iterator[tuple[str, str, str]]:
    if holds.rope_types is not None and head.rope["rope_type"] not in holds.rope_types:
        yield "rope_type", str(head.rope["rope_type"]), f"its code knows {', '.join(sorted(holds.rope_types))}"
    if holds.rope_theta is not None and head.rope["rope_theta"] != holds.rope_theta:
        yield (
            "rope_theta",
            str(head.rope["rope_theta"]),
            f"its code takes {holds.rope_theta:g} whatever config.json says",
        )


def _require_layers(head: HeadConfig, holds: Holds, asked: Asked) -> None:
    ids, num_layers = head.aux_ids, asked.target.num_layers if asked.target else None
    if ids is None:
        return
    found: Any = list(ids)
    if 0 in ids and not holds.boundary_zero:
        raise NotSupportedError(
            f"{holds.title} cannot hold the layers {found}: its ids count outputs of layers, and the embeddings "
            "(boundary 0) are none",
            hint=ANY_HOLDER,
        )
    if num_layers is not None and num_layers in ids and not holds.last_boundary:
        raise NotSupportedError(
            f"{holds.title} cannot hold the layers {found}: it never captures the output of the target's last",
            hint=ANY_HOLDER,
        )
    if not holds.default_aux_only:
        return
    if num_layers is None:
        raise UsageError(
            f"{holds.title} always reads the layers 2, N/2 and N-3 of a target of N; whether {found} are these is "
            "not known",
            hint="give `--target`",
        )
    if not is_deep_enough(num_layers) or ids != aux_boundaries(num_layers):
        raise NotSupportedError(
            f"{holds.title} always reads the layers 2, N/2 and N-3 of a target, here of {num_layers}; the head "
            f"reads {found}",
            hint=ANY_HOLDER,
        )

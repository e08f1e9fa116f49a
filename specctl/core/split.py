"""Whether a target can be split over ranks, decided on its empty modules before weights load.

What transformers cannot split is refused by name here: its own failure is an AttributeError on every
rank (facts as run with transformers 5.24: docs/design.md, Distribution).
"""

from __future__ import annotations

from torch import nn

from specctl.core.decoder import find_decoder
from specctl.core.flow import why_no_stages
from specctl.core.placement import check_sizes, stage_layers
from specctl.core.target import empty_model
from specctl.errors import NotSupportedError, TargetError
from specctl.records.target import TargetSpec


def check_split(spec: TargetSpec, *, pp: int, tp: int, trust_remote_code: bool = False) -> str | None:
    """Raises NotSupportedError when `spec` cannot run on pp stages or tp ranks.

    Also finds the decoder layers, so that a model without them is refused before its weights load.
    Returns what is worth telling: how the layers fall when they do not divide.
    """
    check_sizes(pp, tp)
    model = empty_model(spec, trust_remote_code=trust_remote_code)
    decoder = find_decoder(model, spec.num_layers)
    if pp > 1:
        _check_stages(model, spec, decoder.path, pp)
        reason = why_no_stages(spec, trust_remote_code=trust_remote_code)
        if reason is not None:
            raise _no_stages(model, spec, reason)
        if spec.num_layers % pp:
            return f"{spec.num_layers} layers on {pp} stages: {', '.join(map(str, stage_layers(spec.num_layers, pp)))}"
    if tp > 1:
        _check_tensor_parallel(model, spec, tp)
    return None


def _check_stages(model: nn.Module, spec: TargetSpec, path: str, pp: int) -> None:
    base = getattr(model, str(model.base_model_prefix), None)
    expected = f"{model.base_model_prefix}.layers"
    parts = [name for name in ("embed_tokens", "layers", "norm") if not hasattr(base, name)]
    if path != expected or parts:
        what = f"its layers are at `{path}`, not at `{expected}`" if path != expected else f"it has no `{parts[0]}`"
        raise _no_stages(model, spec, f"{what}, where transformers splits")
    if spec.quantization not in (None, "gguf"):
        raise NotSupportedError(
            f"a target quantized with `{spec.quantization}` cannot be split over {pp} stages by transformers",
            where=spec.path,
            hint="run it with `--pp 1`, or use the unquantized weights",
        )


def _no_stages(model: nn.Module, spec: TargetSpec, reason: str) -> NotSupportedError:
    return NotSupportedError(
        f"`{type(model).__name__}` cannot run on pipeline stages: {reason}",
        where=spec.path,
        hint="run it with `--pp 1`; several processes can share the samples under torchrun",
    )


def _check_tensor_parallel(model: nn.Module, spec: TargetSpec, tp: int) -> None:
    if not getattr(model, "_tp_plan", None):
        raise NotSupportedError(
            f"`{type(model).__name__}` has no tensor-parallel plan in transformers",
            where=spec.path,
            hint="use `--pp`, or `--tp 1`",
        )
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % tp:
            raise TargetError(
                f"`{name}` is {heads}, which {tp} tensor-parallel ranks cannot share evenly",
                where=spec.path,
                hint=f"a `--tp` that divides {heads}",
            )

"""Which states of the target a checkpoint's layer ids mean: one convention in, boundary ids out."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from specctl.errors import InputError, SpecctlError, UsageError
from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Convention
from specctl.formats._settings import place
from specctl.records.layers import aux_boundaries, is_deep_enough, tell_convention

KEY: Final = "eagle_aux_hidden_state_layer_ids"

Unsaid = Literal["default", "fixed", "lost"]
"""What no ids mean: the reader's default, the one choice the project's code has, or ids that are not saved."""


def stated(
    top: Any, inner: Any, *, means: Convention | None, num_layers: int | None, convention: Convention | None = None
) -> tuple[int, ...] | None:
    """Boundary ids from the ids at the top, which are boundaries, and from the project's own, `inner`.

    `means` is how the project counts, None where it has counted both ways. Raises UsageError where the two
    differ or nothing tells how `inner` counts.
    """
    inner_ids, top_ids = _ids(inner), _ids(top)
    outputs = None if inner_ids is None else tuple(i + 1 for i in inner_ids)
    if top_ids is not None:
        fitting = (outputs,) if means == "output" else (outputs, inner_ids)
        if inner_ids is not None and top_ids not in fitting:
            raise UsageError(
                f"config.json names layers twice and differently: {list(top_ids)} at the top and {list(inner_ids)} "
                "in the project's own key",
                hint="say which states the head was trained on with `--aux-layers`, counting layers run before",
            )
        return top_ids
    counted = convention or means or (tell_convention(inner_ids, num_layers) if inner_ids else None)
    if inner_ids is not None and counted is None:
        raise UsageError(
            f"the layer ids {list(inner_ids)} can be counted in two ways, and config.json does not say how",
            hint="`--source-layer-convention boundary` if an id is the number of layers run before, "
            "`output` if it is the layer (from 0) whose output is taken; or give `--target`",
        )
    return outputs if counted == "output" else inner_ids


def quietly(top: Any, inner: Any, *, means: Convention | None, num_layers: int | None) -> tuple[int, ...] | None:
    """As `stated`; None where that would raise."""
    try:
        return stated(top, inner, means=means, num_layers=num_layers)
    except SpecctlError:
        return None


def nested(config: Mapping[str, Any], key: str = KEY) -> Any:
    """A key of `eagle_config`; None where there is none."""
    eagle = config.get("eagle_config")
    return eagle.get(key) if isinstance(eagle, Mapping) else None


def resolved(
    checkpoint: Checkpoint,
    asked: Asked,
    inner: Any,
    *,
    means: Convention | None,
    unsaid: Unsaid = "default",
    top: Any = None,
) -> tuple[tuple[int, ...] | None, list[str]]:
    """The boundary ids of the head in the order of fc's columns, and notes.

    `top` are the ids that are boundaries, those at the top of config.json unless given, `inner` the project's.
    None is what readers take by default of a target that is not given. Raises UsageError where nothing
    says which they are, InputError for ids that no target has or that stand twice.
    """
    num_layers = asked.target.num_layers if asked.target else None
    top = checkpoint.config.get(KEY) if top is None else top
    if asked.aux_ids is not None:
        _require_agreement(asked.aux_ids, top, inner, means=means)
        ids: tuple[int, ...] | None = asked.aux_ids
    else:
        ids = stated(top, inner, means=means, num_layers=num_layers, convention=asked.convention)
    if ids is None:
        return _by_default(num_layers, unsaid, checkpoint)
    _require_possible(ids, num_layers, checkpoint)
    return ids, []


def outputs(ids: Sequence[int] | None) -> list[int] | None:
    """The ids as numbers of the layers whose output is meant; None where boundary 0 has no such number."""
    return None if ids is None or 0 in ids else [b - 1 for b in ids]


def _ids(value: Any) -> tuple[int, ...] | None:
    is_list = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    return tuple(value) if is_list else None


def _require_agreement(asked: tuple[int, ...], top: Any, inner: Any, *, means: Convention | None) -> None:
    """The option settles what the file leaves open; it does not overrule what only one reading has."""
    top_ids, inner_ids = _ids(top), _ids(inner)
    possible = [top_ids] if top_ids is not None else []
    if inner_ids is not None:
        possible += [tuple(i + 1 for i in inner_ids)] + ([] if means == "output" else [inner_ids])
    if possible and sorted(asked) not in [sorted(ids) for ids in possible]:
        raise UsageError(
            f"`--aux-layers` says {list(asked)} and config.json can only mean "
            f"{' or '.join(str(list(ids)) for ids in dict.fromkeys(possible))}",
            hint="leave the option out, or correct config.json",
        )
    if possible and asked not in possible:
        raise UsageError(
            f"`--aux-layers` has the layers of config.json in another order: {list(asked)}",
            hint="the order is that of fc's columns; leave the option out",
        )


def _by_default(
    num_layers: int | None, unsaid: Unsaid, checkpoint: Checkpoint
) -> tuple[tuple[int, ...] | None, list[str]]:
    if unsaid == "lost":
        raise UsageError(
            "config.json does not say which of the target's layers the head reads, and this trainer lets one choose",
            where=place(checkpoint),
            hint="`--aux-layers 2,18,33`, counting layers run before; with `--target` also `--aux-layers aux`",
        )
    if num_layers is None and unsaid == "fixed":
        raise UsageError(
            "the layers that the head reads follow from the target's depth, which config.json does not say",
            where=place(checkpoint),
            hint="give `--target`, or `--aux-layers`, counting layers run before",
        )
    if num_layers is None:
        return None, ["config.json names no layers: readers take 2, N/2 and N-3 of a target of N layers"]
    if not is_deep_enough(num_layers):
        raise UsageError(
            f"config.json names no layers, and the target's {num_layers} are too few for the default of three",
            where=place(checkpoint),
            hint="say which with `--aux-layers`",
        )
    ids = aux_boundaries(num_layers)
    return ids, [f"config.json names no layers: taken are {', '.join(map(str, ids))}, the default for the target"]


def _require_possible(ids: tuple[int, ...], num_layers: int | None, checkpoint: Checkpoint) -> None:
    if len(set(ids)) < len(ids):
        raise InputError(
            f"the layers {list(ids)} name one twice",
            where=place(checkpoint),
            hint="runtimes take each state once, and fc then gets too few columns",
        )
    if min(ids) < 0 or (num_layers is not None and max(ids) > num_layers):
        last = "the target's number of layers" if num_layers is None else str(num_layers)
        raise InputError(f"the layers {list(ids)}, counted before, must lie in 0..{last}", where=place(checkpoint))

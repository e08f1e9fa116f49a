"""Boundary ids and slots: which states of a target are meant. Knows numbers, not models.

Boundary 0 is what enters the first decoder layer, b the residual stream after b layers, N the stream
after the last layer before the final norm. `norm` is the normed final state, a slot of its own.
Source: docs/design.md, Conventions.
"""

from collections.abc import Sequence
from typing import Literal

from specctl.errors import UsageError

NORM = "norm"


def aux_boundaries(num_layers: int) -> tuple[int, int, int]:
    """The EAGLE-3 default boundaries 2, N//2, N-3.

    Raises UsageError when they are not three ids in rising order (N < 7).
    Source: vllm-project/vllm#16937.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if not ids[0] < ids[1] < ids[2]:
        raise UsageError(
            f"`aux` is 2, N//2 and N-3, three ids in rising order; a target of {num_layers} layers gives "
            f"{', '.join(map(str, ids))}",
            hint=f"it is too shallow, pass three distinct ids from 0..{num_layers}, as in `--layers 0,1,last`",
        )
    return ids


def is_deep_enough(num_layers: int) -> bool:
    """Whether `aux` means three ids in rising order."""
    return num_layers >= 7


def tell_convention(ids: Sequence[int], num_layers: int | None) -> Literal["boundary", "output"] | None:
    """What unlabelled `ids` count: layers run before the state, or the layer from 0 whose output it is.

    Only what can be meant in one way: the defaults of either counting, an id that equals the number of
    layers, or three ids that begin as the defaults do. None where both are possible.
    """
    listed = tuple(sorted(ids))
    if num_layers is not None and is_deep_enough(num_layers):
        boundaries = aux_boundaries(num_layers)
        if listed == boundaries:
            return "boundary"
        if listed == tuple(b - 1 for b in boundaries):
            return "output"
    if num_layers is not None and listed and listed[-1] == num_layers:
        return "boundary"
    if len(listed) == 3 and listed[0] in (1, 2):
        return "output" if listed[0] == 1 else "boundary"
    return None


def parse_slots(text: str, num_layers: int) -> tuple[str, ...]:
    """The slots that `text` names, in depth order, `norm` last, each once.

    `text` is a comma-separated list of ids, `last`, `norm`, `all` (0..N) and `aux`.
    Raises UsageError for an id outside 0..N, an unknown word, an id given twice or an empty list.
    """
    boundaries: list[int] = []
    has_norm = False
    for word in (part.strip() for part in text.split(",")):
        if word == NORM:
            if has_norm:
                raise UsageError("`--layers` names `norm` twice")
            has_norm = True
        else:
            boundaries.extend(_boundaries(word, num_layers, text))
    _refuse_repeats(boundaries, wide="all" in text or "aux" in text)
    slots = [str(b) for b in sorted(set(boundaries))]
    return tuple(slots + [NORM] * has_norm)


def _boundaries(word: str, num_layers: int, text: str) -> Sequence[int]:
    if word == "all":
        return range(num_layers + 1)
    if word == "aux":
        return aux_boundaries(num_layers)
    if word == "last":
        return (num_layers,)
    try:
        boundary = int(word)
    except ValueError:
        raise UsageError(
            f"`--layers {text}` has `{word}`, which is neither an id nor `last`, `norm`, `all` or `aux`",
            hint=f"ids run from 0 (embeddings) to {num_layers} (after the last layer)",
        ) from None
    if not 0 <= boundary <= num_layers:
        raise UsageError(
            f"`--layers {text}` asks for boundary {boundary}; this target has 0..{num_layers}",
            hint=f"`last` is {num_layers}, the stream after the last layer; ids do not count from the end",
        )
    return (boundary,)


def _refuse_repeats(boundaries: Sequence[int], *, wide: bool) -> None:
    repeated = sorted({b for b in boundaries if boundaries.count(b) > 1})
    if repeated and not wide:
        raise UsageError(f"`--layers` names boundary {repeated[0]} twice", hint="each id once, in any order")

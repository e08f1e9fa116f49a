"""The map between the vocabularies as numbers: what each draft id means, and in which ways a table is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specctl.files.subject import Subject
from specctl.files.tensors import Table
from specctl.records.contract import Repair

if TYPE_CHECKING:
    from numpy.typing import NDArray


def map_targets(subject: Subject) -> NDArray[Any] | None:
    """Target id of each draft id, int64 [D], of a map that has the right length and is needed."""
    head, offsets = subject.head, subject.d2t
    if head is None or offsets is None or len(offsets) != head.draft_vocab_size:
        return None
    if not head.is_reduced and subject.runtime != "sglang":
        return None  # vLLM takes no map over the whole vocabulary; D2T_UNNEEDED speaks of it
    targets: NDArray[Any] = offsets + counting(offsets)
    return targets


def is_unfilled(subject: Subject) -> bool:
    """Whether d2t is still the zeros it starts from: all zero, and `t2d` does not mark the first D tokens."""
    head, offsets, mask = subject.head, subject.d2t, subject.t2d
    if head is None or not head.is_reduced or offsets is None or len(offsets) < 2 or offsets.any():
        return False
    is_meant = mask is not None and mask.sum() == head.draft_vocab_size and mask[: head.draft_vocab_size].all()
    return not is_meant


def is_absolute(subject: Subject) -> bool:
    """Whether the entries are target ids: the tokens that `t2d` marks, or, without it, rising ids too
    large to be offsets."""
    head, values = subject.head, subject.d2t
    if head is None or values is None or not head.is_reduced or len(values) != head.draft_vocab_size:
        return False
    if len(values) < 2 or not values.any() or (values < 0).any() or (values >= head.vocab_size).any():
        return False
    mask = subject.t2d
    if mask is not None and mask.shape == (head.vocab_size,):
        marked = mask.nonzero()[0]
        return len(marked) == len(values) and sorted(values.tolist()) == marked.tolist()
    rises = bool((values[1:] > values[:-1]).all())
    return rises and int(values[-1]) + len(values) - 1 >= head.vocab_size


def map_from_mask(subject: Subject, rounded: NDArray[Any] | None = None) -> Repair | None:
    """The map that a whole `t2d` implies, if `rounded` (a map that went through floats) agrees with it."""
    head, mask = subject.head, subject.t2d
    if head is None or mask is None or mask.shape != (head.vocab_size,) or mask.sum() != head.draft_vocab_size:
        return None
    if subject.layout in ("nemo", "modelopt"):
        return None  # their rows need not be in rising order, so the mask alone does not say which is which
    marked = mask.nonzero()[0].astype("int64")
    offsets = marked - counting(marked)
    if rounded is not None:
        import numpy as np

        if rounded.shape != offsets.shape or not np.allclose(rounded, offsets, rtol=2**-7, atol=0.5):
            return None
    return Repair(replace={subject.names.get("d2t", "d2t"): int64_table(offsets)})


def int64_table(values: NDArray[Any]) -> Table:
    return Table("I64", values.shape, values.astype("<i8").tobytes())


def counting(values: NDArray[Any]) -> NDArray[Any]:
    import numpy as np

    return np.arange(len(values), dtype=np.int64)

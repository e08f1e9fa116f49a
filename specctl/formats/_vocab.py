"""The map from draft ids to the target's: whole, in rising order, as int64 offsets, with its mask beside it.

Legend: D draft vocabulary, V target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from specctl.errors import InputError, NotSupportedError
from specctl.files.checkpoint import Checkpoint
from specctl.files.inside import is_inside
from specctl.files.regular import shown
from specctl.files.reorder import rows_in_order
from specctl.files.tensors import FLOATS, Source, Table, TensorEntry, read_array
from specctl.files.torchzip import read_torch_values
from specctl.records.head import MAX_VOCABULARY, HeadConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SIDE_FILE: Final = "eagle_meta.pt"
"""Where NeMo Automodel keeps the chosen ids (NVIDIA-NeMo/Automodel#2447)."""

_MASK_DTYPES: Final = ("BOOL", "U8", "I8", "I16", "I32", "I64")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tensors that change, and the names of those that fall away, when the map is put in order."""

    changed: Mapping[str, Source]
    dropped: tuple[str, ...]
    notes: tuple[str, ...]


def ordered(checkpoint: Checkpoint, tensors: Mapping[str, TensorEntry], head: HeadConfig) -> Vocabulary:
    """The vocabulary of `head` in canonical form: rows by rising target id, no map where it is whole.

    Raises InputError for a map that is missing, no map of offsets, or not the one its mask says.
    """
    if head.is_reduced or "d2t" in tensors or "t2d" in tensors:
        _require_size(head.vocab_size)
    offsets, notes = _offsets(checkpoint, tensors, head)
    if offsets is None:
        _mask(tensors, head)  # a mask alone says nothing, but must not contradict
        return Vocabulary(
            {}, ("t2d",) if "t2d" in tensors else (), ("`t2d` of the full vocabulary left out",) * ("t2d" in tensors)
        )
    import numpy as np

    targets = np.arange(len(offsets)) + offsets
    _require_mask(tensors, head, targets)
    order = np.argsort(targets, kind="stable")
    is_sorted = bool((order[1:] > order[:-1]).all())
    changed: dict[str, Source] = {}
    if not is_sorted:
        notes.append("rows of `lm_head` and `d2t` sorted by target id; each row keeps the token it stands for")
        changed["lm_head.weight"] = _sorted_rows(tensors, order, checkpoint)
    if not head.is_reduced:
        notes.append("`d2t` and `t2d` left out: the draft proposes from the whole vocabulary")
        return Vocabulary(changed, ("d2t", "t2d"), tuple(notes))
    if not is_sorted or "d2t" not in tensors or tensors["d2t"].dtype != "I64":
        table = (targets[order] - np.arange(len(order))).astype("<i8")
        changed["d2t"] = Table("I64", table.shape, table.tobytes())
    if "t2d" not in tensors or tensors["t2d"].dtype != "BOOL":
        changed["t2d"] = _mask_table(targets, head.vocab_size)
    return Vocabulary(changed, (), tuple(notes))


def _offsets(
    checkpoint: Checkpoint, tensors: Mapping[str, TensorEntry], head: HeadConfig
) -> tuple[NDArray[np.int64] | None, list[str]]:
    """int64 [D], in range and without doubles; None for a whole vocabulary that brings no map."""
    import numpy as np

    entry = tensors.get("d2t")
    if entry is None and not head.is_reduced:
        return None, []
    if entry is None:
        ids = _chosen_ids(checkpoint, head)
        _require_map(ids - np.arange(len(ids)), tensors, head, SIDE_FILE)
        return ids - np.arange(len(ids)), [f"`d2t` made from `selected_token_ids` of {SIDE_FILE}"]
    values = read_array(entry)
    notes = []
    if entry.dtype in FLOATS:
        _require_whole(values, tensors, entry)
        notes.append(f"`d2t` was stored as {entry.dtype}; its mask `t2d` confirms every value")
    elif entry.dtype not in ("I64", "I32", "I16"):
        raise InputError(f"`d2t` has dtype {entry.dtype}; expected I64", where=shown(str(entry.path)))
    offsets = values.astype(np.int64)
    _require_map(offsets, tensors, head, shown(str(entry.path)))
    if head.is_reduced and not offsets.any() and "t2d" not in tensors:
        raise InputError(
            "`d2t` is all zeros, which proposes the first ids of the target's vocabulary, and no `t2d` confirms it",
            where=shown(str(entry.path)),
            hint="export the head with the map it was trained with",
        )
    return offsets, notes


def _chosen_ids(checkpoint: Checkpoint, head: HeadConfig) -> NDArray[np.int64]:
    """The target ids of the head's rows from NeMo's side file, int64 [D]."""
    import numpy as np

    path = checkpoint.folder / SIDE_FILE
    values = read_torch_values(path) if is_inside(checkpoint.folder, SIDE_FILE) else {}
    entry = values.get("selected_token_ids")
    if (
        not isinstance(entry, TensorEntry)
        or entry.shape != (head.draft_vocab_size,)
        or entry.dtype not in ("I64", "I32")
    ):
        raise InputError(
            f"the head proposes {head.draft_vocab_size} of {head.vocab_size} tokens and has no `d2t` that says which",
            where=shown(str(checkpoint.folder)),
            hint=f"export it with the map; one of NeMo Automodel has it in `{SIDE_FILE}`, to be laid beside it",
        )
    return read_array(entry).astype(np.int64)


def _require_whole(values: NDArray[Any], tensors: Mapping[str, TensorEntry], entry: TensorEntry) -> None:
    import numpy as np

    if "t2d" not in tensors or not (np.isfinite(values).all() and (values == np.round(values)).all()):
        raise InputError(
            f"`d2t` has dtype {entry.dtype}, in which ids are rounded, and nothing confirms them",
            where=shown(str(entry.path)),
            hint="export the head with `d2t` as int64; a cast of the whole checkpoint must leave it out",
        )


def _require_map(offsets: NDArray[np.int64], tensors: Mapping[str, TensorEntry], head: HeadConfig, where: str) -> None:
    """Raises InputError for a target id outside the vocabulary or given twice, with its place."""
    import numpy as np

    size = head.vocab_size
    places = np.arange(len(offsets))
    outside = (offsets < -size) | (offsets >= size)
    targets = places + np.where(outside, 0, offsets)
    bad = np.flatnonzero(outside | (targets < 0) | (targets >= size))
    if len(bad):
        row = int(bad[0])
        raise InputError(
            f"`d2t[{row}]` is {int(offsets[row])}: draft id {row} would be token {row + int(offsets[row])} of {size}",
            where=where,
            hint=_absolute(offsets, size),
        )
    by_target = np.argsort(targets, kind="stable")
    twice = np.flatnonzero(targets[by_target][1:] == targets[by_target][:-1])
    if len(twice):
        first, second = sorted(int(by_target[twice[0] + i]) for i in (0, 1))
        raise InputError(
            f"`d2t` gives token {int(targets[first])} to draft ids {first} and {second}",
            where=where,
            hint=_absolute(offsets, size),
        )


def _absolute(offsets: NDArray[np.int64], size: int) -> str:
    """A hint for what may have gone wrong."""
    import numpy as np

    are_ids = len(np.unique(offsets)) == len(offsets) and bool((offsets >= 0).all() and (offsets < size).all())
    if are_ids:
        return "the numbers look like the target's ids themselves; `d2t` holds offsets: id = i + d2t[i]"
    return "`d2t` holds offsets: id = i + d2t[i]; export the head again"


def _mask(tensors: Mapping[str, TensorEntry], head: HeadConfig) -> NDArray[np.bool_] | None:
    """bool [V]. Raises InputError for a mask of another kind, and for one with gaps over a whole vocabulary."""
    entry = tensors.get("t2d")
    if entry is None:
        return None
    values = read_array(entry)
    where = shown(str(entry.path))
    if entry.dtype not in _MASK_DTYPES or not ((values == 0) | (values == 1)).all():
        raise InputError(f"`t2d` has dtype {entry.dtype}; expected a mask of 0 and 1", where=where)
    mask: NDArray[np.bool_] = values.astype(bool)
    if int(mask.sum()) != head.draft_vocab_size:
        raise InputError(
            f"`t2d` marks {int(mask.sum())} tokens; `draft_vocab_size` is {head.draft_vocab_size}", where=where
        )
    return mask


def _require_mask(tensors: Mapping[str, TensorEntry], head: HeadConfig, targets: NDArray[np.int64]) -> None:
    mask = _mask(tensors, head)
    if mask is not None and not mask[targets].all():
        row = int((~mask[targets]).argmax())
        raise InputError(
            f"`d2t` gives draft id {row} token {int(targets[row])}, which `t2d` does not mark",
            where=shown(str(tensors["t2d"].path)),
            hint=_absolute(targets - range(len(targets)), head.vocab_size),
        )


def _sorted_rows(tensors: Mapping[str, TensorEntry], order: NDArray[np.intp], checkpoint: Checkpoint) -> Source:
    if "lm_head.weight" not in tensors:
        raise InputError(
            "`d2t` orders the rows of `lm_head.weight`, which is not there", where=shown(str(checkpoint.folder))
        )
    return rows_in_order(tensors["lm_head.weight"], order.tolist())


def _mask_table(targets: NDArray[np.int64], size: int) -> Table:
    import numpy as np

    mask = np.zeros(size, np.bool_)
    mask[targets] = True
    return Table("BOOL", (size,), mask.tobytes())


def _require_size(size: int) -> None:
    if size > MAX_VOCABULARY:
        raise NotSupportedError(f"`vocab_size` is {size}; maps of at most {MAX_VOCABULARY} tokens are handled")


def whole_map(size: int) -> tuple[Table, Table]:
    """`d2t` int64 [V] and `t2d` bool [V] of a whole vocabulary, for layouts that always have them."""
    _require_size(size)
    return Table("I64", (size,), bytes(8 * size)), Table("BOOL", (size,), b"\x01" * size)

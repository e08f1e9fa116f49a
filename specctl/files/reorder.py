"""Putting the states a head fuses, or the rows it proposes, into another order without changing what it computes.

A runtime joins the target's states in rising order of layers (vllm `tuple(sorted(set(ids)))`), so fc's
column blocks, the norms over them and the learned mask move together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specctl.files.tensors import Gather, Source, Table, TensorEntry, chunks


def states_in_order(tensors: Mapping[str, TensorEntry], ids: Sequence[int], width: int) -> dict[str, Source]:
    """The tensors that change, by canonical name, when the states of `ids` are joined in rising order.

    `width` is one state's columns. Bits stay as they are; only their place changes.
    """
    order = tuple(sorted(range(len(ids)), key=ids.__getitem__))
    changed: dict[str, Source] = {}
    if "fc.weight" in tensors:
        changed["fc.weight"] = Gather(tensors["fc.weight"], axis=1, order=order, block=width)
    for name in ("input_norm.weight", "mask_hidden"):
        if name in tensors:
            changed[name] = _flat_blocks(tensors[name], order, width)
    for place, source in enumerate(order):
        if f"fc_norm.{source}.weight" in tensors:
            changed[f"fc_norm.{place}.weight"] = tensors[f"fc_norm.{source}.weight"]
    return changed


def rows_in_order(tensor: TensorEntry, order: Sequence[int]) -> Source:
    """A [D, H] table with row `order[i]` at place i."""
    return Gather(tensor, axis=0, order=tuple(order))


def _flat_blocks(tensor: TensorEntry, order: tuple[int, ...], width: int) -> Source:
    """The blocks of a vector [A * T], or of one behind axes of size 1, in another order; small, so in memory."""
    flat = replace(tensor, shape=(1, len(order) * width))
    data = b"".join(map(bytes, chunks(Gather(flat, axis=1, order=order, block=width))))
    return Table(tensor.dtype, tensor.shape, data)

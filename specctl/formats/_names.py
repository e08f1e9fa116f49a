"""Tensor names: from any trainer's spelling to the canonical one, and from that to a layout's."""

import re
from collections.abc import Callable, Mapping
from typing import Final

from specctl.errors import InputError
from specctl.files.checkpoint import Checkpoint
from specctl.files.regular import shown
from specctl.files.serverview import bare
from specctl.files.tensors import Source, TensorEntry

MIDLAYER: Final = "midlayer."
INV_FREQ: Final = "rotary_emb.inv_freq"

_BUFFERS: Final = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached|original_inv_freq)$")
_NORMS: Final = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
"""SGLang's first names for the norms over single states (models/llama_eagle3.py:338-343)."""


def canonical(name: str) -> str:
    """`name` without what wrappers put before it, with `layers.0.` for `midlayer.`."""
    name = bare(name)
    if name.startswith(MIDLAYER):
        return f"layers.0.{name.removeprefix(MIDLAYER)}"
    first, _, rest = name.partition(".")
    return f"{_NORMS[first]}.{rest}" if first in _NORMS else name


def by_canonical_name(checkpoint: Checkpoint) -> tuple[dict[str, TensorEntry], tuple[str, ...]]:
    """The tensors by canonical name, and the buffers left out, by their names in the file.

    Raises InputError when two tensors mean the same one.
    """
    found: dict[str, TensorEntry] = {}
    buffers = []
    for name, entry in checkpoint.tensors.items():
        meant = canonical(name)
        if _BUFFERS.search(meant) and meant != INV_FREQ:
            buffers.append(name)
            continue
        if meant in found:
            raise InputError(
                f"`{shown(found[meant].name)}` and `{shown(name)}` are both `{shown(meant)}`",
                where=shown(str(checkpoint.folder)),
                hint="remove the one that is not meant",
            )
        found[meant] = entry
    return found, tuple(buffers)


def layer_count(tensors: Mapping[str, TensorEntry]) -> int:
    """How many decoder layers have tensors: one more than the highest index."""
    indices = [name.split(".")[1] for name in tensors if name.startswith("layers.")]
    return max((int(i) + 1 for i in indices if i.isdecimal() and len(i) < 5), default=0)


def as_midlayer(name: str) -> str:
    """The spelling of projects whose heads have one layer."""
    return MIDLAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def spelled(
    tensors: Mapping[str, Source], spell: Callable[[str], str] = str
) -> tuple[dict[str, Source], dict[str, str]]:
    """The tensors by the names of a file, and from those back to the canonical ones."""
    return {spell(name): source for name, source in tensors.items()}, {spell(name): name for name in tensors}

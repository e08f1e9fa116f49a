"""The first EAGLE-3: one layer called `midlayer`, always three states of fixed layers, no norms but its own.

Source: SafeAILab/EAGLE `eagle/model/cnets.py`, `eagle/traineagle3/cnets.py`.
"""

from typing import Any, Final

from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, has_names, is_ours, marked
from specctl.formats._holds import Holds
from specctl.formats._names import as_midlayer, spelled
from specctl.formats._settings import plain_settings, require_usable
from specctl.formats._trained import TRAINED_THETA, at_trained_theta
from specctl.formats._written import fitted, plain_config
from specctl.records.layers import aux_boundaries, is_deep_enough

TITLE: Final = "EAGLE (SafeAILab/EAGLE)"

HOLDS: Final = Holds(
    title="EAGLE",
    default_aux_only=True,
    square_fc=False,
    other_width=True,
    rope_types=frozenset({"default", "linear", "dynamic"}),
    rope_theta=TRAINED_THETA,
    embedding="wider",
)


def recognise(checkpoint: Checkpoint) -> int:
    """The class of a plain Llama beside `midlayer.`."""
    score = marked(checkpoint, "eagle")
    if score is not None:
        return score
    is_plain = architecture(checkpoint) == "LlamaForCausalLM"
    return 90 * (is_plain and has_names(checkpoint, "midlayer."))


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """The only ones its code has, for a target of known depth."""
    said = quietly(checkpoint.config.get(KEY), None, means="boundary", num_layers=num_layers)
    if said is None and num_layers is not None and is_deep_enough(num_layers):
        return aux_boundaries(num_layers)
    return said


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`. What it was trained with is not what config.json says: rope has base 10000."""
    require_usable(checkpoint)
    settings, notes = plain_settings(checkpoint, asked)
    if not is_ours(checkpoint):
        notes += at_trained_theta(settings, "EAGLE")
    ids, more = resolved(checkpoint, asked, None, means="boundary", unsaid="fixed")
    return head_from(checkpoint, asked, settings, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`."""
    config, tensors, notes = fitted(head, HOLDS, asked)
    keys: dict[str, Any] = plain_config(config, "eagle", "LlamaForCausalLM")
    if config.hidden_size == config.target_hidden_size:
        # Its code takes the key as the sign that the head brings an embedding of its own.
        del keys["target_hidden_size"]
    if keys["rope_scaling"] is not None:
        keys["rope_scaling"] = {"type": config.rope["rope_type"], **keys["rope_scaling"]}
    keys["torch_dtype"] = config.dtype
    files, canonical = spelled(tensors, as_midlayer)
    return Written(keys, files, canonical, tuple(notes))

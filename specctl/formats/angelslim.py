"""AngelSlim: `midlayer.`, both maps always, ids as outputs of layers under a key of its own.

Source: angelslim 0.5.0 `compressor/speculative/train/models/draft/llama_eagle3.py`.
"""

from typing import Final

from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, outputs, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, has_names, is_ours, marked
from specctl.formats._holds import Holds
from specctl.formats._names import as_midlayer, spelled
from specctl.formats._settings import plain_settings, require_usable
from specctl.formats._trained import TRAINED_THETA, at_trained_theta
from specctl.formats._written import fitted, plain_config, with_whole_map

TITLE: Final = "AngelSlim (Tencent/AngelSlim)"
ARCHITECTURE: Final = "Eagle3LlamaForCausalLM"
OWN_KEY: Final = "aux_hidden_states_layer_ids"

HOLDS: Final = Holds(title="AngelSlim", rope_types=frozenset({"default", "linear", "dynamic"}))


def recognise(checkpoint: Checkpoint) -> int:
    """Its class, and better a key of its own."""
    score = marked(checkpoint, "angelslim")
    if score is not None:
        return score
    config = checkpoint.config
    if architecture(checkpoint) != ARCHITECTURE:
        return 0
    has_key = any(key in config for key in (OWN_KEY, "target_model_type", "modal_type"))
    return 95 if has_key else 60 * (has_names(checkpoint, "midlayer.") and KEY not in config)


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """Its own key, each id one less than the boundary."""
    config = checkpoint.config
    return quietly(config.get(KEY), config.get(OWN_KEY), means="output", num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`. What it was trained with is not what config.json says: rope has base 10000."""
    require_usable(checkpoint)
    settings, notes = plain_settings(checkpoint, asked)
    if not is_ours(checkpoint):
        notes += at_trained_theta(settings, "AngelSlim")
    ids, more = resolved(checkpoint, asked, checkpoint.config.get(OWN_KEY), means="output")
    return head_from(checkpoint, asked, settings, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`."""
    config, tensors, notes = fitted(head, HOLDS, asked)
    keys = plain_config(config, "angelslim", ARCHITECTURE) | {"dtype": config.dtype}
    own = outputs(config.aux_ids)
    if own is not None:
        keys[OWN_KEY] = own
    if config.rope["rope_theta"] != TRAINED_THETA:
        notes.append("AngelSlim's inference reads `rope_theta`; its training would take 10000 all the same")
    files, canonical = spelled(with_whole_map(tensors, config), as_midlayer)
    return Written(keys, files, canonical, tuple(notes))

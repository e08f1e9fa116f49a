"""NVIDIA ModelOpt's export: `layers.N.`, `d2t` without `t2d`, no embedding, an `eagle_config` of its own.

Ids have been counted both ways: the trainer's are outputs of layers, published heads (v3) have boundaries.
Source: modelopt 0.47.0 `torch/export/plugins/{hf_spec_configs,hf_spec_export}.py`.
"""

from typing import Final

from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, nested, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, block, has_names, marked
from specctl.formats._holds import Holds
from specctl.formats._names import spelled
from specctl.formats._settings import TEMPLATE, plain_settings, require_usable
from specctl.formats._written import eagle_config, fitted, plain_config

TITLE: Final = "ModelOpt (NVIDIA/Model-Optimizer)"
ARCHITECTURE: Final = "LlamaForCausalLMEagle3"

HOLDS: Final = Holds(
    title="ModelOpt",
    layers=None,
    aux_count=None,
    attention_bias=True,
    mlp_bias=True,
    without_fc=True,
    embedding="never",
)


def recognise(checkpoint: Checkpoint) -> int:
    """The words of its `eagle_config`; or `layers.` with `d2t` and without `t2d`."""
    score = marked(checkpoint, "modelopt")
    if score is not None:
        return score
    config, tensors = checkpoint.config, checkpoint.tensors
    if any(key in block(config, "eagle_config") for key in TEMPLATE):
        return 92
    has_half_map = "d2t" in tensors and "t2d" not in tensors and "embed_tokens.weight" not in tensors
    is_plain = architecture(checkpoint) == ARCHITECTURE and KEY not in config and has_names(checkpoint, "layers.")
    return 60 * (is_plain and has_half_map and "torch_dtype" in config)


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """Nested ids, where only one way of counting them is possible."""
    config = checkpoint.config
    return quietly(config.get(KEY), nested(config), means=None, num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`."""
    require_usable(checkpoint)
    settings, notes = plain_settings(checkpoint, asked)
    ids, more = resolved(checkpoint, asked, nested(checkpoint.config), means=None, unsaid="lost")
    return head_from(checkpoint, asked, settings, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`."""
    config, tensors, notes = fitted(head, HOLDS, asked)
    tensors.pop("t2d", None)
    keys = plain_config(config, "modelopt", ARCHITECTURE)
    del keys["target_hidden_size"]
    keys |= {"torch_dtype": config.dtype, "eagle_config": {**TEMPLATE, **eagle_config(config)}}
    files, canonical = spelled(tensors)
    return Written(keys, files, canonical, tuple(notes))

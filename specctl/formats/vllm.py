"""The canonical layout: loads in vLLM unchanged.

Source: vllm 0.33.0 `models/llama_eagle3.py`, `models/qwen3_eagle3.py`, `v1/spec_decode/llm_base_proposer.py`.
"""

from typing import Final

from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, nested, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, has_names, marked
from specctl.formats._holds import FLAGS, Holds
from specctl.formats._names import as_midlayer, spelled
from specctl.formats._settings import plain_settings, require_usable
from specctl.formats._written import eagle_config, fitted, parallel_config, plain_config, window_config
from specctl.records.head import Block

TITLE: Final = "vLLM, the canonical layout"

HOLDS: Final = Holds(
    title="the vLLM layout",
    layers=None,
    aux_count=None,
    boundary_zero=True,
    norm_before_residual=True,
    norm_before_fc=True,
    fc_norm=True,
    norm_output=True,
    attention_bias=True,
    mlp_bias=True,
    qwen3=True,
    parallel=True,
    without_fc=True,
    other_width=True,
    window=True,
    lm_head="any",
)

_LLAMA: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_QWEN3: Final = ("Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM")


def recognise(checkpoint: Checkpoint) -> int:
    """Its classes and, better, ids at the top, which no trainer but speculators writes."""
    score = marked(checkpoint, "vllm")
    if score is not None:
        return score
    name = architecture(checkpoint)
    if name in _QWEN3:
        return 90
    if name in _LLAMA:
        return 40 + 38 * isinstance(checkpoint.config.get(KEY), list)
    is_head = has_names(checkpoint, "fc.weight") or has_names(checkpoint, "midlayer.")
    return (20 if name == "LlamaForCausalLM" else 10) * is_head


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """The ids at the top, else the nested ones: vLLM's first runner took them as they stand, SGLang adds one."""
    config = checkpoint.config
    return quietly(_top(checkpoint), nested(config), means=None, num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`."""
    require_usable(checkpoint)
    settings, notes = plain_settings(checkpoint, asked)
    ids, more = resolved(checkpoint, asked, nested(checkpoint.config), means=None, top=_top(checkpoint))
    block: Block = "qwen3" if architecture(checkpoint) in _QWEN3 else "llama"
    return head_from(checkpoint, asked, settings, block=block, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`."""
    config, tensors, notes = fitted(head, HOLDS, asked)
    keys = plain_config(config, "vllm", "Eagle3Qwen3ForCausalLM" if config.block == "qwen3" else _LLAMA[0])
    keys |= {flag: getattr(config, flag) for flag in FLAGS}
    keys |= window_config(config) | parallel_config(config)
    keys |= {"dtype": config.dtype, "torch_dtype": config.dtype, "eagle_config": eagle_config(config)}
    # Both runtimes read `midlayer.` for the one layer; deeper heads have numbers.
    files, canonical = spelled(tensors, as_midlayer if config.num_hidden_layers == 1 else str)
    return Written(keys, files, canonical, tuple(notes))


def _top(checkpoint: Checkpoint) -> object:
    """The ids at the top; else `eagle_config.layer_ids`, which vLLM's second runner takes as they stand."""
    return checkpoint.config.get(KEY) or nested(checkpoint.config, "layer_ids")

"""What SGLang serves: one Llama layer called `midlayer`, ids as outputs of layers in `eagle_config`.

Source: sglang 0.5.23 `srt/models/llama_eagle3.py`, `model_executor/.../spec_aux_hidden_state.py`.
"""

from typing import Final

from specctl.errors import NotSupportedError
from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, nested, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, block, has_names, marked
from specctl.formats._holds import ANY_HOLDER, Holds
from specctl.formats._names import as_midlayer, by_canonical_name, layer_count, spelled
from specctl.formats._settings import place, plain_settings, require_usable
from specctl.formats._written import LM_HEAD, eagle_config, fitted, plain_config

TITLE: Final = "SGLang"
ARCHITECTURE: Final = "LlamaForCausalLMEagle3"
NO_PARALLEL: Final = "SGLang cannot serve P-EAGLE heads; use vLLM >= 0.16"

HOLDS: Final = Holds(
    title="SGLang",
    aux_count=None,
    last_boundary=False,
    norm_before_fc=True,
    fc_norm=True,
    norm_output=True,
    without_fc=True,
    square_fc=False,
    other_width=True,
    embedding="wider",
    lm_head="any",
)


def recognise(checkpoint: Checkpoint) -> int:
    """Nested ids without ids at the top, beside `midlayer.`; or its first names for norms."""
    score = marked(checkpoint, "sglang")
    if score is not None:
        return score
    if has_names(checkpoint, "aux_norm_") or "use_aux_norm" in checkpoint.config:
        return 95
    if architecture(checkpoint) != ARCHITECTURE:
        return 0
    has_ids = KEY in block(checkpoint.config, "eagle_config") and KEY not in checkpoint.config
    return 30 + 40 * (has_ids and has_names(checkpoint, "midlayer."))


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """Nested ids, each one less than the boundary."""
    config = checkpoint.config
    return quietly(config.get(KEY), nested(config), means="output", num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`."""
    require_usable(checkpoint)
    if layer_count(by_canonical_name(checkpoint)[0]) > 1:
        raise NotSupportedError(
            "SGLang norms the input of a deeper layer with `hidden_norm`, all others with `input_layernorm`; such a "
            "head computes something else elsewhere",
            where=place(checkpoint),
            hint="`--from vllm` if it was trained for vLLM",
        )
    settings, notes = plain_settings(checkpoint, asked)
    ids, more = resolved(checkpoint, asked, nested(checkpoint.config), means="output")
    return head_from(checkpoint, asked, settings, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`."""
    if head.config.parallel_drafting:
        raise NotSupportedError(NO_PARALLEL, hint=ANY_HOLDER)
    config, tensors, notes = fitted(head, HOLDS, asked)
    keys = plain_config(config, "sglang", ARCHITECTURE) | {"eagle_config": eagle_config(config)}
    if config.hidden_size == config.target_hidden_size:
        # SGLang takes the key itself as the sign of an embedding of its own only where the widths differ.
        del keys["target_hidden_size"]
    keys |= {flag: getattr(config, flag) for flag in ("norm_before_fc", "fc_norm", "norm_output")}
    # Without a dtype it serves in float16; without `draft_vocab_size` it stops, and null is the target's head.
    keys |= {"dtype": config.dtype, "torch_dtype": config.dtype}
    keys["draft_vocab_size"] = config.draft_vocab_size if LM_HEAD in tensors else None
    files, canonical = spelled(tensors, as_midlayer)
    return Written(keys, files, canonical, tuple(notes))

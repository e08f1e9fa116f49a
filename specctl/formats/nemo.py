"""NeMo Automodel: the target's config with the draft's keys on top, names that begin with `model.`.

Source: nemo-automodel 0.7.0 `recipes/llm/{train_eagle3,peagle_recipe}.py`,
`components/speculative/eagle/{draft_llama,peagle_draft}.py`.
"""

from dataclasses import replace
from typing import Any, Final

from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, has_names, marked
from specctl.formats._holds import Holds
from specctl.formats._names import spelled
from specctl.formats._settings import plain_settings, require_usable
from specctl.formats._written import fitted, plain_config, with_mask_axes

TITLE: Final = "NeMo Automodel (NVIDIA-NeMo/Automodel)"
ARCHITECTURE: Final = "LlamaEagle3DraftModel"

HOLDS: Final = Holds(
    title="NeMo Automodel",
    fc_norm=True,
    norm_output=True,
    attention_bias=True,
    mlp_bias=True,
    parallel=True,
    other_width=True,
    embedding="needed",
)
HOLDS_PARALLEL: Final = replace(HOLDS, layers=None)

_AT_TOP: Final = ("lm_head.weight", "d2t", "t2d", "mask_hidden")
_WINDOWS: Final = ("layer_types", "sliding_window")


def recognise(checkpoint: Checkpoint) -> int:
    """Its class, or names below `model.`."""
    score = marked(checkpoint, "nemo")
    if score is not None:
        return score
    if architecture(checkpoint) == ARCHITECTURE:
        return 97
    return 85 * has_names(checkpoint, "model.fc.") + 5 * ("num_depths" in checkpoint.config)


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """Only what specctl has added: the trainer writes none."""
    return quietly(checkpoint.config.get(KEY), None, means="boundary", num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`. Layers are counted in the weights: config.json has the target's number."""
    require_usable(checkpoint)
    raw: dict[str, Any] = {key: value for key, value in checkpoint.config.items() if key not in _WINDOWS}
    settings, notes = plain_settings(checkpoint, asked, raw)
    windows = [key for key in _WINDOWS if checkpoint.config.get(key) is not None]
    if windows:
        notes.append(f"left behind, as the target's (the draft attends fully): {', '.join(f'`{k}`' for k in windows)}")
    ids, more = resolved(checkpoint, asked, None, means="boundary", unsaid="lost")
    return head_from(checkpoint, asked, settings, ids=ids, notes=notes + more, are_layers_counted=True)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`."""
    is_parallel = head.config.parallel_drafting
    config, tensors, notes = fitted(head, HOLDS_PARALLEL if is_parallel else HOLDS, asked)
    keys = plain_config(config, "nemo", ARCHITECTURE)
    keys |= {"dtype": config.dtype, "fc_norm": config.fc_norm, "norm_output": config.norm_output}
    keys["parallel_drafting"] = is_parallel
    if is_parallel:
        keys |= {"mask_token_id": config.mask_token_id}
        keys |= {} if config.num_draft_tokens is None else {"num_depths": config.num_draft_tokens}
    files, canonical = spelled(with_mask_axes(tensors, config), _below_model)
    return Written(keys, files, canonical, tuple(notes))


def _below_model(name: str) -> str:
    return name if name in _AT_TOP else f"model.{name}"

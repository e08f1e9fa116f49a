"""SpecForge: `midlayer.` for EAGLE-3 with a map even over the whole vocabulary, `layers.N.` for P-EAGLE.

Its `norm_output` is not vLLM's: up to 0.2.0 it says whether lm_head's input is normed, absent meaning
true, and the state fed to the next step never is (sgl-project/SpecForge#879).
Source: specforge 0.2.0 `export/checkpoint_io.py`, `modeling/draft/{llama3_eagle,peagle}.py`.
"""

from dataclasses import replace
from typing import Final

from specctl.errors import NotSupportedError, UsageError
from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.formats._aux import KEY, nested, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import architecture, has_names, marked
from specctl.formats._holds import Holds
from specctl.formats._names import as_midlayer, spelled
from specctl.formats._settings import place, plain_settings, require_usable
from specctl.formats._written import (
    eagle_config,
    fitted,
    parallel_config,
    plain_config,
    with_mask_axes,
    with_whole_map,
)

TITLE: Final = "SpecForge (sgl-project/SpecForge)"
PARALLEL: Final = "PEagleDraftModel"
ARCHITECTURE: Final = "LlamaForCausalLMEagle3"

_NORM_OUTPUT: Final = "its `norm_output` means something else: there the state fed to the next step is never normed"
HOLDS: Final = Holds(
    title="SpecForge",
    fc_norm=True,
    other_width=True,
    parallel=True,
    instead={"norm_output": f"{_NORM_OUTPUT}; `--to vllm` holds it"},
)
HOLDS_PARALLEL: Final = replace(
    HOLDS,
    title="SpecForge (P-EAGLE)",
    layers=None,
    norm_before_residual=True,
    fc_norm=False,
    rope_types=frozenset({"default"}),
    embedding="needed",
)


def recognise(checkpoint: Checkpoint) -> int:
    """A P-EAGLE class outside speculators; or `midlayer.` with both maps and rope said twice."""
    score = marked(checkpoint, "specforge")
    if score is not None:
        return score
    config = checkpoint.config
    if architecture(checkpoint) == PARALLEL and "speculators_config" not in config:
        return 95
    has_maps = "d2t" in checkpoint.tensors and "t2d" in checkpoint.tensors
    if architecture(checkpoint) != ARCHITECTURE or not (has_maps and has_names(checkpoint, "midlayer.")):
        return 0
    is_mirrored = "dtype" in config and "rope_parameters" in config and "rope_theta" in config
    return 50 * (KEY not in config) + 30 * (is_mirrored and KEY not in config)


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """Nested ids, outputs of layers, where the user's draft config had them."""
    config = checkpoint.config
    return quietly(config.get(KEY), nested(config), means="output", num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`."""
    require_usable(checkpoint)
    _settle_norm_output(checkpoint, asked)
    raw = {key: value for key, value in checkpoint.config.items() if key != "norm_output"}
    if architecture(checkpoint) == PARALLEL:
        raw["parallel_drafting"] = True
    settings, notes = plain_settings(checkpoint, asked, raw)
    ids, more = resolved(checkpoint, asked, nested(raw), means="output")
    return head_from(checkpoint, asked, settings, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`. `norm_output` is not written: its absence has one meaning."""
    is_parallel = head.config.parallel_drafting
    config, tensors, notes = fitted(head, HOLDS_PARALLEL if is_parallel else HOLDS, asked)
    keys = plain_config(config, "specforge", PARALLEL if is_parallel else ARCHITECTURE)
    keys |= {"dtype": config.dtype, "eagle_config": eagle_config(config)} | parallel_config(config)
    keys |= {"norm_before_residual": config.norm_before_residual} if is_parallel else {"fc_norm": config.fc_norm}
    mapped = with_mask_axes(with_whole_map(tensors, config), config)
    files, canonical = spelled(mapped, str if is_parallel else as_midlayer)
    return Written(keys, files, canonical, tuple(notes))


def _settle_norm_output(checkpoint: Checkpoint, asked: Asked) -> None:
    """Raises unless the key is absent or the user says what the head does."""
    said = checkpoint.config.get("norm_output")
    if said is None or asked.norm_output is not None:
        return
    if said:
        raise UsageError(
            "`norm_output` is true, which SpecForge up to 0.2.0 writes for heads that feed back the un-normed state, "
            "and later ones for heads that feed back the normed one",
            where=place(checkpoint),
            hint="`--no-norm-output` for a head trained with SpecForge up to 0.2.0, `--norm-output` for later ones",
        )
    raise NotSupportedError(
        "`norm_output` is false: SpecForge up to 0.2.0 then feeds the un-normed state to lm_head, as no runtime does",
        where=place(checkpoint),
        hint="`--no-norm-output` if it was trained with a later SpecForge, where the key has vLLM's meaning",
    )

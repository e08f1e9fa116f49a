"""A draft's config.json as flat settings in vLLM's spelling, and what of it is carried along or left behind.

Knows keys, not tensors. Source: vllm `models/llama_eagle3.py`, `v1/spec_decode/llm_base_proposer.py:355-379`.
"""

from collections.abc import Mapping
from typing import Any, Final

from specctl.errors import InputError, NotSupportedError, UsageError
from specctl.files.checkpoint import HARMLESS, Checkpoint
from specctl.files.head import Asked
from specctl.files.regular import shown
from specctl.records.headkeys import KINDS, misfits
from specctl.records.rope import MULTIMODAL, differences, is_per_attention_kind, new_spelling, old_spelling

MARKER: Final = "specctl"
MASK_TOKENS: Final = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
FLAGS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

CARRIED: Final = ("initializer_range", "attention_dropout", "use_cache")
"""Keys that have a type and change nothing in a head."""

READ: Final = (frozenset(KINDS) - set(CARRIED)) | {
    MARKER,
    "verifier",
    "num_depths",
    "speculators_model_type",
    "speculators_version",
    "dspark_noise_token_id",
    "use_sliding_window",
    "max_window_layers",
    "use_aux_norm",
    "logit_scale",
    "bias",
}
"""Keys that become settings of the head."""

LEFT: Final = (
    "quantization_config",
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "use_cache",
    "transformers_version",
    "_name_or_path",
)
"""Keys about how something was run or stored, a target's as a rule; a draft that inherits them breaks."""

TEMPLATE: Final[Mapping[str, Any]] = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": 1,
}
"""ModelOpt's words for the one shape of head that others have too. Source: modelopt hf_spec_configs.py."""

_NESTED: Final = ("eagle_aux_hidden_state_layer_ids", "layer_ids", "use_aux_hidden_state", "norm_before_fc")


def require_usable(checkpoint: Checkpoint) -> None:
    """Raises InputError for a config.json that is missing or has a key of the wrong type, or without weights."""
    for problem in checkpoint.problems:
        if problem.rule not in HARMLESS:
            raise InputError(
                f"expected {problem.expected}; found {problem.found}",
                where=f"{shown(str(checkpoint.folder))}: {problem.where}",
            )
    for path, expected in misfits(checkpoint.config):
        raise InputError(f"`{'.'.join(path)}` must be {expected}", where=place(checkpoint))


def place(checkpoint: Checkpoint) -> str:
    """Where config.json lies, for an error."""
    return shown(str(checkpoint.folder / "config.json"))


def marker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What specctl wrote about its own writing; empty when it did not write the file."""
    value = config.get(MARKER)
    return value if isinstance(value, Mapping) else {}


def plain_settings(
    checkpoint: Checkpoint, asked: Asked, raw: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The flat settings of `raw` (config.json unless given), with the rest under `extra`, and notes.

    Left to the layout: `eagle_aux_hidden_state_layer_ids`. Raises InputError for keys that contradict each
    other, UsageError for an option that contradicts one, NotSupportedError for what changes the head in
    ways no canonical key says.
    """
    raw = checkpoint.config if raw is None else raw
    where = place(checkpoint)
    settings = {key: value for key, value in raw.items() if key in READ}
    eagle = raw.get("eagle_config") or {}
    _refuse_unknown_shapes(raw, eagle, where)
    if eagle.get("norm_before_fc") is not None:
        settings["norm_before_fc"] = eagle["norm_before_fc"]  # vLLM and SGLang let the nested one win
    if raw.get("use_aux_norm") is not None:
        settings.setdefault("fc_norm", raw["use_aux_norm"])
    for key in ("norm_before_residual", "norm_output"):
        settings[key] = chosen(key, settings.get(key), getattr(asked, key), where)
    settings["eagle_config"] = {"use_aux_hidden_state": eagle.get("use_aux_hidden_state") is not False}
    settings["num_aux_hidden_states"] = raw.get("num_aux_hidden_states")
    settings["mask_token_id"] = chosen("mask_token", mask_token(raw, where), asked.mask_token_id, where)
    drafts = raw.get("num_draft_tokens") or raw.get("num_depths")
    settings["num_draft_tokens"] = chosen("num_draft_tokens", drafts, asked.num_draft_tokens, where)
    verifier = raw.get("verifier") or marker(raw).get("verifier")
    settings["verifier"] = verifier if isinstance(verifier, str) else None
    notes = _settle_rope(settings, where) + _settle_windows(settings, where)
    settings["extra"], left = _carried(raw, eagle)
    notes += [f"left behind, as no setting of a draft: {', '.join(f'`{key}`' for key in left)}"] if left else []
    return settings, notes


def chosen(key: str, said: Any, wanted: Any, where: str) -> Any:
    """What config.json says, or else the option. Raises UsageError when they differ."""
    if said is not None and wanted is not None and said != wanted:
        raise UsageError(
            f"`--{key.replace('_', '-')}` says {_word(wanted)} and config.json says {_word(said)}",
            where=where,
            hint="leave the option out, or correct config.json",
        )
    return wanted if said is None else said


def mask_token(raw: Mapping[str, Any], where: str) -> int | None:
    """The reserved id, under whatever key. Raises InputError when two keys differ or it is no id."""
    dflash = raw.get("dflash_config") or {}
    said = {key: raw[key] for key in MASK_TOKENS if raw.get(key) is not None}
    if dflash.get("mask_token_id") is not None:
        said["dflash_config.mask_token_id"] = dflash["mask_token_id"]
    values = list(said.values())
    if any(type(value) is not int or value != values[0] for value in values):
        listed = ", ".join(f"`{key}` {shown(str(value))}" for key, value in said.items())
        raise InputError(f"the reserved token has several ids: {listed}", where=where, hint="keep the one it has")
    return values[0] if values else None


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(str(value))


def _refuse_unknown_shapes(raw: Mapping[str, Any], eagle: Mapping[str, Any], where: str) -> None:
    if any("Deepseek" in name for name in raw.get("architectures") or ()):
        raise NotSupportedError(
            f"`{shown(raw['architectures'][0])}` has latent attention (MLA); specctl knows Llama and Qwen3 layers",
            where=where,
        )
    for key, usual in TEMPLATE.items():
        if eagle.get(key) not in (None, usual):
            raise NotSupportedError(
                f"`eagle_config.{key}` is {shown(str(eagle[key]))}; the heads specctl knows have {_word(usual)}",
                where=where,
            )
    if raw.get("logit_scale") not in (None, 1):
        raise NotSupportedError(f"`logit_scale` is {shown(str(raw['logit_scale']))}; only 1 is known", where=where)
    if raw.get("fc_norm") and (raw.get("norm_before_fc") or eagle.get("norm_before_fc")):
        raise InputError(
            "`fc_norm` and `norm_before_fc` are both true; a head has one of them",
            where=where,
            hint="keep the one whose tensors are there: `fc_norm.N.weight` or `input_norm.weight`",
        )


def _settle_rope(settings: dict[str, Any], where: str) -> list[str]:
    """Make `rope_parameters` flat; says what was chosen or left out."""
    parameters, notes = settings.get("rope_parameters"), []
    _require_rope_types(settings, where)
    if is_per_attention_kind(parameters):
        assert isinstance(parameters, Mapping)
        kinds = set(settings.get("layer_types") or ("full_attention",))
        branches = [new_spelling(settings, kind) for kind in sorted(kinds)]
        if any(branch is None or branch != branches[0] for branch in branches):
            raise InputError(
                f"`rope_parameters` is one set per kind of attention ({', '.join(map(shown, parameters))}); "
                f"the draft's layers are {', '.join(sorted(map(shown, kinds)))}",
                where=where,
                hint="write the one set the head was trained with",
            )
        settings["rope_parameters"] = branches[0]
        notes.append(f"rope taken from `rope_parameters.{min(kinds)}`, the kind of the draft's layers")
    new, old = new_spelling(settings), old_spelling(settings)
    differing = differences(new, old) if new and old and "rope_theta" in old else ()
    has_scaling = isinstance(settings.get("rope_scaling"), Mapping)
    for key in differing:
        assert new is not None and old is not None
        if new.get(key) is None or old.get(key) is None or not (has_scaling or key == "rope_theta"):
            continue  # said in one spelling only, as trainers write a flat theta beside whole parameters
        raise InputError(
            f"`{shown(key)}` is {shown(str(new[key]))} in `rope_parameters` and {shown(str(old[key]))} in the old "
            "spelling",
            where=where,
            hint="write the value the head was trained with in both",
        )
    stray = [
        key for part in ("rope_parameters", "rope_scaling") for key in MULTIMODAL if key in (settings.get(part) or {})
    ]
    if stray:
        notes.append(f"left out of rope, as a text draft has none: {', '.join(f'`{key}`' for key in stray)}")
    return notes


def _require_rope_types(settings: Mapping[str, Any], where: str) -> None:
    """Raises InputError for a kind of rope that is no text, in whichever spelling."""
    parts = [settings.get("rope_scaling"), settings.get("rope_parameters")]
    parts += [part for part in (parts[1] or {}).values() if isinstance(part, Mapping)]
    for part in parts:
        for key in ("rope_type", "type"):
            if part and not isinstance(part.get(key), str | None):
                raise InputError(f"`{key}` of rope must be a text; found {shown(str(part[key]))}", where=where)


def _settle_windows(settings: dict[str, Any], where: str) -> list[str]:
    """Keep a window only where a layer slides; `layer_types` is null where all attend fully."""
    types, window = settings.get("layer_types"), settings.get("sliding_window")
    if types and len(types) != settings.get("num_hidden_layers"):
        raise InputError(
            f"`layer_types` has {len(types)} entries; `num_hidden_layers` is {settings.get('num_hidden_layers')}",
            where=where,
            hint="one entry for each draft layer",
        )
    slides = "sliding_attention" in (types or ())
    if slides and window is None:
        raise InputError("`layer_types` has `sliding_attention` and `sliding_window` is not said", where=where)
    settings["layer_types"] = types if slides else None
    settings["sliding_window"] = window if slides else None
    return [f"`sliding_window` {window} is left out: no draft layer slides"] if window and not slides else []


def _carried(raw: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The keys that change nothing here and go along, and the names of those that do not."""
    extra = {key: value for key, value in raw.items() if key not in READ and key not in LEFT}
    inner = {key: value for key, value in eagle.items() if key not in TEMPLATE and key not in _NESTED}
    if inner:
        extra["eagle_config"] = inner
    return extra, [key for key in LEFT if raw.get(key) is not None]

"""vllm-project/speculators: the decoder layer's settings nested, the verifier named.

Source: speculators 0.9.0 `models/{eagle3,peagle}/config.py`; vllm 0.33.0
`transformers_utils/configs/speculators/algos.py`.
"""

from collections.abc import Mapping
from typing import Any, Final

from specctl.errors import InputError, NotSupportedError, UsageError
from specctl.files.checkpoint import Checkpoint
from specctl.files.head import Asked, Head, Written
from specctl.files.regular import shown
from specctl.formats._aux import KEY, quietly, resolved
from specctl.formats._canonical import head_from
from specctl.formats._evidence import block, marked
from specctl.formats._holds import Holds
from specctl.formats._names import spelled
from specctl.formats._settings import MARKER, place, plain_settings, require_usable
from specctl.formats._written import eagle_config, fitted, layer_config, mark, window_config, with_mask_axes
from specctl.records.head import DEFAULT_AUX_COUNT, Block, HeadConfig

TITLE: Final = "speculators (vllm-project/speculators)"
SCHEMA: Final = "0.9.0"
"""The version of speculators whose config.json this is."""

NORMS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

HOLDS: Final = Holds(
    title="speculators",
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
    other_width=True,
    window=True,
    embedding="needed",
)

_BLOCKS: Final[Mapping[str, Block]] = {"llama": "llama", "qwen3": "qwen3"}
_TOP_EXTRA: Final = ("embed_requires_grad",)


def recognise(checkpoint: Checkpoint) -> int:
    """`speculators_config`, which nobody else writes."""
    score = marked(checkpoint, "speculators")
    if score is not None:
        return score
    config = checkpoint.config
    return 97 if "speculators_config" in config else 80 * ("speculators_model_type" in config)


def aux_ids(checkpoint: Checkpoint, num_layers: int | None) -> tuple[int, ...] | None:
    """Ids at the top, which are boundaries."""
    return quietly(checkpoint.config.get(KEY), None, means="boundary", num_layers=num_layers)


def read(checkpoint: Checkpoint, asked: Asked) -> Head:
    """As `plugins.Format.read`."""
    require_usable(checkpoint)
    flat = _flat(checkpoint)
    if flat.get("norm_before_residual") is None and asked.norm_before_residual is None:
        raise UsageError(
            "config.json does not say `norm_before_residual`: vLLM takes true, speculators false",
            where=place(checkpoint),
            hint="`--norm-before-residual` or `--no-norm-before-residual`, as the head was trained",
        )
    settings, notes = plain_settings(checkpoint, asked, flat)
    ids, more = resolved(checkpoint, asked, None, means="boundary")
    layer = _BLOCKS.get(str(flat.get("model_type") or "llama"))
    if layer is None:
        raise NotSupportedError(
            f"the decoder layer is of kind `{shown(str(flat['model_type']))}`; known are llama and qwen3",
            where=place(checkpoint),
        )
    return head_from(checkpoint, asked, settings, block=layer, ids=ids, notes=notes + more)


def write(head: Head, asked: Asked) -> Written:
    """As `plugins.Format.write`. Raises UsageError without a verifier's name or a number of draft tokens."""
    config, tensors, notes = fitted(head, HOLDS, asked)
    is_parallel = config.parallel_drafting
    keys: dict[str, Any] = {key: config.extra[key] for key in _TOP_EXTRA if key in config.extra}
    keys |= {
        "architectures": ["PEagleDraftModel" if is_parallel else "Eagle3DraftModel"],
        "speculators_model_type": "peagle" if is_parallel else "eagle3",
        "speculators_version": SCHEMA,
        "speculators_config": _proposal(config, asked),
        "transformer_layer_config": _layer(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        KEY: list(config.aux_ids) if config.aux_ids is not None else None,
        **{flag: getattr(config, flag) for flag in NORMS},
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        MARKER: mark(config, "speculators"),
    }
    if is_parallel:
        keys["mask_token_id"] = config.mask_token_id
    files, canonical = spelled(with_mask_axes(tensors, config))
    return Written(keys, files, canonical, (*notes, *_caveats(config)))


def _flat(checkpoint: Checkpoint) -> dict[str, Any]:
    """Layer settings and head settings side by side, in vLLM's spelling."""
    config, layer = checkpoint.config, checkpoint.config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise InputError("config.json has no `transformer_layer_config`", where=place(checkpoint))
    kind = config.get("speculators_model_type")
    if kind not in ("eagle3", "peagle"):
        raise NotSupportedError(
            f"`speculators_model_type` is {shown(str(kind))}; known are eagle3 and peagle", where=place(checkpoint)
        )
    inner = ("transformer_layer_config", "speculators_config")
    flat = {**layer, **{key: value for key, value in config.items() if key not in inner and value is not None}}
    flat["architectures"] = None
    flat["model_type"] = layer.get("model_type")
    flat["parallel_drafting"] = kind == "peagle"
    return flat | _said(block(config, "speculators_config"))


def _said(proposal: Mapping[str, Any]) -> dict[str, Any]:
    """The verifier's name and the number of draft tokens, where they are well said."""
    found: dict[str, Any] = {}
    verifier = block(proposal, "verifier").get("name_or_path")
    methods = proposal.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    count = first.get("speculative_tokens")
    if isinstance(verifier, str) and verifier:
        found["verifier"] = verifier
    if type(count) is int and count > 0:
        found["num_draft_tokens"] = count
    return found


def _proposal(config: HeadConfig, asked: Asked) -> dict[str, Any]:
    name = config.verifier or (asked.target.name if asked.target else None)
    if name is None:
        raise UsageError(
            "speculators names the target in config.json, and the head does not say it", hint="give `--target`"
        )
    if config.num_draft_tokens is None:
        raise UsageError(
            "speculators writes into config.json how many tokens are drafted at a time, and the head does not say it",
            hint="give it as `--num-draft-tokens`; vLLM takes it when it serves the checkpoint by itself",
        )
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "peagle" if config.parallel_drafting else "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": name, "architectures": [asked.target.architecture] if asked.target else []},
    }


def _layer(config: HeadConfig) -> dict[str, Any]:
    extra = {key: value for key, value in config.extra.items() if key not in _TOP_EXTRA}
    layer = {**extra, "model_type": config.block, **layer_config(config), **window_config(config)}
    if config.num_aux != DEFAULT_AUX_COUNT:
        # vLLM passes it on from here only; the list of ids alone does not set the width of a Llama head's fc.
        layer["num_aux_hidden_states"] = config.num_aux
    return layer | ({"eagle_config": eagle_config(config)} if "eagle_config" in extra else {})


def _caveats(config: HeadConfig) -> list[str]:
    notes = []
    if config.parallel_drafting and config.fc_norm:
        notes.append(
            "vLLM drops `fc_norm` of speculators P-EAGLE heads and then stops at `fc_norm.0.weight`; `--to vllm` serves"
        )
    if config.target_hidden_size != config.hidden_size:
        notes.append("vLLM reads `target_hidden_size`; the trainer of speculators needs draft and target of one width")
    return notes

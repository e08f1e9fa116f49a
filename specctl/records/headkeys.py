"""The keys of a draft's config.json: which type each has, and from them a HeadConfig.

One table serves the rules, which list what does not fit, and the layouts, which refuse it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from specctl.errors import InputError
from specctl.records.head import DEFAULT_AUX_COUNT, Block, HeadConfig
from specctl.records.rope import rope_of

MAX_SIZE: Final = 1 << 31
MAX_LAYERS: Final = 4096
QWEN3_HEAD_DIM: Final = 128
"""What transformers' Qwen3Config takes where `head_dim` is not said; Llama divides."""

DTYPES: Final = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
ATTENTION_KINDS: Final = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "attention",
)
"""What transformers 5 takes for an entry of `layer_types` in a Llama or Qwen3 layer."""

SIZES: Final = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Without these transformers fills in those of a 7B Llama, silently."""


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_size(value: Any) -> bool:
    return _is_int(value) and 0 < value < MAX_SIZE


def _is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or _is_int(value)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_SIZE = ("a positive whole number", _is_size)
_SIZE_OR_NULL = ("a positive whole number or null", _or_null(_is_size))
_FLAG = ("true or false", lambda value: type(value) is bool)
_FLAG_OR_NULL = ("true, false or null", lambda value: value is None or value in (0, 1))
_FRACTION = ("a number with a point, as 0.02", lambda value: type(value) is float and math.isfinite(value))
_DTYPE = (
    "bfloat16, float16 or float32",
    lambda value: value is None or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES),
)
_ATTENTION = (
    "a list of kinds of attention, or null",
    lambda value: value is None or (isinstance(value, list) and all(item in ATTENTION_KINDS for item in value)),
)
_TOKEN = ("a token id (whole number) or null", _or_null(_is_int))
_TOKENS = ("a token id, a list of them, or null", lambda value: value is None or _is_int(value) or _is_ids(value))
_IDS = ("a list of whole numbers or null", _or_null(_is_ids))
_TEXT = ("a text or null", lambda value: value is None or isinstance(value, str))
_OBJECT = ("an object or null", lambda value: value is None or isinstance(value, dict))
_TEXTS = (
    "a list of texts or null",
    lambda value: value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)),
)

KINDS: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": ("a whole number from 1 to 4096", lambda v: _is_size(v) and v <= MAX_LAYERS),
    "num_attention_heads": _SIZE,
    "num_key_value_heads": _SIZE_OR_NULL,
    "head_dim": _SIZE_OR_NULL,
    "vocab_size": _SIZE,
    "draft_vocab_size": _SIZE_OR_NULL,
    "target_hidden_size": _SIZE_OR_NULL,
    "num_aux_layers": _SIZE_OR_NULL,
    "num_depths": _SIZE_OR_NULL,
    "bias": _FLAG_OR_NULL,
    "num_aux_hidden_states": (
        "a whole number from 1 to 4096 or null",
        _or_null(lambda v: _is_size(v) and v <= MAX_LAYERS),
    ),
    "max_position_embeddings": _SIZE,
    "rms_norm_eps": ("a positive number with a point, as 1e-05", lambda v: type(v) is float and 0 < v < math.inf),
    "initializer_range": _FRACTION,
    "attention_dropout": ("a number", _is_number),
    "use_cache": _FLAG,
    "hidden_act": ("the name of a function, as silu", lambda value: isinstance(value, str)),
    "norm_before_residual": _FLAG_OR_NULL,
    "norm_before_fc": _FLAG_OR_NULL,
    "fc_norm": _FLAG_OR_NULL,
    "norm_output": _FLAG_OR_NULL,
    "attention_bias": _FLAG,
    "mlp_bias": _FLAG,
    "parallel_drafting": _FLAG_OR_NULL,
    "tie_word_embeddings": _FLAG,
    "mask_token_id": _TOKEN,
    "pard_token": _TOKEN,
    "ptd_token_id": _TOKEN,
    "num_draft_tokens": _SIZE_OR_NULL,
    "bos_token_id": _TOKEN,
    "eos_token_id": _TOKENS,
    "pad_token_id": _TOKEN,
    "eagle_aux_hidden_state_layer_ids": _IDS,
    "aux_hidden_states_layer_ids": _IDS,
    "layer_ids": _IDS,
    "use_aux_hidden_state": _FLAG_OR_NULL,
    "sliding_window": _SIZE_OR_NULL,
    "layer_types": _ATTENTION,
    "architectures": _TEXTS,
    "model_type": _TEXT,
    "torch_dtype": _DTYPE,
    "dtype": _DTYPE,
    "rope_theta": ("a positive number or null", lambda v: v is None or (_is_number(v) and v > 0)),
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "eagle_config": _OBJECT,
    "speculators_config": _OBJECT,
    "transformer_layer_config": _OBJECT,
    "dflash_config": _OBJECT,
    "quantization_config": _OBJECT,
}
NESTED: Final = ("eagle_config", "transformer_layer_config", "dflash_config", "rope_scaling", "rope_parameters")


def misfits(config: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """The keys whose value has another type than readers expect, with what they expect."""
    for key, value in config.items():
        if key in KINDS and not KINDS[key][1](value):
            yield (*prefix, key), KINDS[key][0]
        elif key in NESTED and isinstance(value, Mapping):
            yield from misfits(value, (*prefix, key))


def missing_sizes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The sizes that a config does not say and that readers then make up."""
    return tuple(key for key in SIZES if settings.get(key) is None)


def parse_head(settings: Mapping[str, Any], *, block: Block, where: str, extra: Mapping[str, Any]) -> HeadConfig:
    """The head that flat vLLM-spelled `settings` describe.

    Raises InputError for a value of the wrong type, a size that is not said and a rope without theta.
    """
    for path, expected in misfits(settings):
        raise InputError(f"`{'.'.join(path)}` must be {expected}; found {_short(settings, path)}", where=where)
    missing = missing_sizes(settings)
    if missing:
        raise InputError(f"config.json does not say `{missing[0]}`", where=where)
    rope = rope_of(settings, _attention_kind(settings))
    if rope is None or "rope_theta" not in rope:
        raise InputError(
            "config.json has no `rope_theta`, neither at the top nor in `rope_parameters`",
            where=where,
            hint="write the theta the head was trained with; readers would take 10000 without a word",
        )
    return lenient_head(settings, block=block, rope=rope, extra=extra)


def lenient_head(
    settings: Mapping[str, Any], *, block: Block, rope: Mapping[str, Any], extra: Mapping[str, Any]
) -> HeadConfig:
    """As `parse_head`, for settings that are known to fit."""
    ids = settings.get("eagle_aux_hidden_state_layer_ids")
    hidden, heads, vocab = settings["hidden_size"], settings["num_attention_heads"], settings["vocab_size"]
    eagle = settings.get("eagle_config") or {}
    listed = ids or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    dtype = settings.get("dtype") or settings.get("torch_dtype")
    types = settings.get("layer_types")
    return HeadConfig(
        block=block,
        hidden_size=hidden,
        intermediate_size=settings["intermediate_size"],
        num_hidden_layers=settings["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or default_head_dim(settings),
        vocab_size=vocab,
        draft_vocab_size=settings.get("draft_vocab_size") or vocab,
        target_hidden_size=settings.get("target_hidden_size") or hidden,
        num_aux=(settings.get("num_aux_layers") if block == "qwen3" else None)
        or settings.get("num_aux_hidden_states")
        or len(listed)
        or DEFAULT_AUX_COUNT,
        aux_ids=tuple(ids) if ids else None,
        rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
        hidden_act=settings.get("hidden_act") or "silu",
        rope=rope,
        max_position_embeddings=settings.get("max_position_embeddings"),
        use_aux=eagle.get("use_aux_hidden_state") is not False,
        norm_before_residual=bool(settings.get("norm_before_residual")),
        norm_before_fc=bool(settings.get("norm_before_fc")),
        fc_norm=bool(settings.get("fc_norm")),
        norm_output=bool(settings.get("norm_output")),
        attention_bias=bool(settings.get("attention_bias")),
        mlp_bias=bool(settings.get("mlp_bias")),
        parallel_drafting=bool(settings.get("parallel_drafting")),
        mask_token_id=settings.get("mask_token_id"),
        num_draft_tokens=settings.get("num_draft_tokens"),
        sliding_window=settings.get("sliding_window"),
        layer_types=tuple(types) if types else None,
        bos_token_id=settings.get("bos_token_id"),
        eos_token_id=_tokens(settings.get("eos_token_id")),
        pad_token_id=settings.get("pad_token_id"),
        dtype=dtype.removeprefix("torch.") if dtype else None,
        verifier=settings.get("verifier"),
        extra=extra,
    )


def default_head_dim(settings: Mapping[str, Any]) -> int:
    """What transformers takes where `head_dim` is not said."""
    if settings.get("model_type") == "qwen3":
        return QWEN3_HEAD_DIM
    return max(1, int(settings["hidden_size"] // settings["num_attention_heads"]))


def _tokens(value: Any) -> int | tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) else value


def _attention_kind(settings: Mapping[str, Any]) -> str | None:
    kinds = set(settings.get("layer_types") or ())
    return kinds.pop() if len(kinds) == 1 else None


def _short(settings: Mapping[str, Any], path: tuple[str, ...]) -> str:
    value: Any = settings
    for key in path:
        value = value[key]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

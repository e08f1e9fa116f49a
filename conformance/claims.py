"""What the error rules of `check-ckpt` claim of vLLM, by what can be seen: it refuses the draft, or serves it.

The text of one that is served is the target's own all the same: what is lost is acceptance. Every error rule stands
in one of three tables; tests/test_conformance.py holds them complete.
"""

from collections.abc import Sequence
from typing import Final

REFUSED: Final = frozenset(
    (
        *("ACTIVATION_UNKNOWN", "ARCH_MISSING", "ARCH_UNKNOWN", "AUX_COUNT_DIFFERS", "AUX_COUNT_IMPLICIT"),
        *("AUX_LAYERS_DUPLICATE", "AUX_LAYERS_RANGE", "CONFIG_BROKEN", "CONFIG_MISSING", "CONFIG_SIZE_MISSING"),
        *(
            "CONFIG_TYPE",
            "D2T_ABSOLUTE",
            "D2T_LENGTH",
            "D2T_RANGE",
            "D2T_UNNEEDED",
            "DRAFT_VOCAB_LARGER",
            "DRAFT_VOCAB_UNSAID",
        ),
        *("EMBED_ROWS", "EMBED_WIDTH", "FC_NORM_UNFLAGGED", "FC_WIDTH", "HEADS_DIVIDE", "INDEX_BROKEN"),
        *("INDEX_SHARD_MISSING", "INDEX_SUBFOLDER", "KIND_OTHER", "LAYER_TYPES_LENGTH", "LM_HEAD_ROWS"),
        *("MASK_HIDDEN_MISSING", "MASK_HIDDEN_SIZE", "MASK_TOKEN_MISSING", "MODEL_TYPE_MISSING"),
        *("MODEL_TYPE_UNKNOWN", "NAME_PREFIX", "NAME_UNKNOWN", "NORMS_SPECULATORS_PEAGLE", "PARALLEL_UNFUSED"),
        *("QUANT_INHERITED", "QUANT_SCALES", "ROPE_INCOMPLETE", "ROPE_MROPE", "ROPE_NESTED", "SHAPE_WRONG"),
        *("SPECULATORS_HIDDEN", "SPECULATORS_INCOMPLETE", "WEIGHTS_BROKEN", "WEIGHTS_CONSOLIDATED"),
        *("WEIGHTS_MISSING", "WEIGHTS_UNSAFE", "WEIGHTS_WRAPPED"),
    )
)
"""The draft does not load, or the first text ends in an error."""

CRASHES: Final = frozenset(("EMBED_WIDTH",))
"""Of those refused, the ones that end the server's process without a word: it reads memory that nobody wrote."""

SERVED: Final = frozenset(
    (
        *("AUX_LAYERS_CONTRADICT", "AUX_LAYERS_UNSORTED", "AUX_LAYERS_ZERO", "BIAS_KEY", "BIAS_MISSING"),
        *("BIAS_UNUSED", "D2T_DTYPE", "D2T_DUPLICATE", "D2T_MISSING", "D2T_ZERO", "DTYPE_INTEGER"),
        *("EOS_OUT_OF_RANGE", "FC_BLOCK_EMPTY", "FC_NORM_MISSING", "INDEX_TENSOR_MISSING", "INPUT_NORM_MISSING"),
        *("INPUT_NORM_UNFLAGGED", "LAYERS_COUNT", "LM_HEAD_MISSING", "MASK_TOKEN_DISAGREES", "MASK_TOKEN_EOS"),
        *("MASK_TOKEN_RANGE", "NAME_TWICE", "NORMS_BOTH", "NORM_CONTRADICTS", "NORM_NESTED", "ROPE_CONTRADICTS"),
        *("ROPE_INV_FREQ", "ROPE_MISSING", "ROWS_EQUAL", "T2D_DISAGREES", "T2D_LENGTH", "TENSOR_MISSING"),
        *("TENSOR_TWICE", "TIED_REDUCED", "TOKEN_OUT_OF_RANGE", "VALUES_CONSTANT", "VALUES_NOT_FINITE"),
    )
)
"""The draft loads and the text is right."""

NOT_GIVEN: Final = {
    "INDEX_PATH_ESCAPES": "specctl refuses to open what lies outside, whatever a loader does",
    "LINK_OUTSIDE": "specctl refuses to open what lies outside, whatever a loader does",
    "PARALLEL_CLASS": "it takes a draft with DeepSeek layers",
}
"""Rules whose fixture is not given to vLLM, and why; `why_not` knows those that follow from its options."""


def why_not(rule: str, options: Sequence[str], *, has_own_target: bool) -> str | None:
    """Why a rule's fixture is not given to vLLM; None where it is."""
    if rule in NOT_GIVEN:
        return NOT_GIVEN[rule]
    if "sglang" in options:
        return "it is about SGLang"
    if "--runtime-version" in options:
        return "it is about older releases"
    if "--pp" in options:
        return "it is about pipeline stages"
    return "it takes another target" if has_own_target else None

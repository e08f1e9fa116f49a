"""Rules on the speculators layout as vLLM reads it."""

from collections.abc import Iterator, Mapping
from typing import Final

from specctl.files.serverview import brief, release
from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.runtimes import Version

FLAGS_SINCE: Final[Mapping[str, Version]] = {"norm_before_fc": (0, 19), "fc_norm": (0, 25), "norm_output": (0, 25)}
"""vLLM release whose reader of this layout passes the flag on."""

SPECULATORS_KINDS: Final = ("eagle3", "peagle")


@rule(
    "SPECULATORS_INCOMPLETE",
    "error",
    "a speculators config lacks what vLLM needs",
    story="vLLM reads the speculators layout through its own parser. Without the kind of head or the layer's settings "
    "it stops, or builds a 7B Llama. The proposal and the verifier it needs only where the folder is served as the "
    "model itself (`vllm serve DRAFT`), and stops with `Invalid speculators config structure` there.",
    fix="complete config.json, or convert the head to the vllm layout",
    source="vLLM 0.33.0 transformers_utils/configs/speculators/{base,algos}.py",
    needs=("vllm",),
)
def speculators_incomplete(subject: Subject) -> Iterator[Found]:
    if not subject.is_speculators:
        return
    outer = subject.raw.get("speculators_config")
    outer = outer if isinstance(outer, Mapping) else {}
    proposals, verifier = outer.get("proposal_methods"), outer.get("verifier")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    if not (isinstance(first, Mapping) and type(first.get("speculative_tokens")) is int):
        where = "config.json: speculators_config.proposal_methods"
        yield Found(where, "one with `speculative_tokens`", brief(proposals), level="warning")
    if not (isinstance(verifier, Mapping) and isinstance(verifier.get("name_or_path"), str)):
        where = "config.json: speculators_config.verifier"
        yield Found(where, "one with `name_or_path`", brief(verifier), level="warning")
    kind = subject.raw.get("speculators_model_type")
    if kind not in SPECULATORS_KINDS:
        yield Found("config.json: speculators_model_type", "eagle3 or peagle", brief(kind))
    layer = subject.raw.get("transformer_layer_config")
    if isinstance(layer, Mapping) and layer.get("model_type", "llama") not in ("llama", "qwen3"):
        yield Found("config.json: transformer_layer_config.model_type", "llama or qwen3", brief(layer["model_type"]))
    if kind == "peagle" and subject.raw.get("mask_token_id") is None and subject.mask_token_ids:
        yield Found("config.json: mask_token_id", "the reserved token, under this key", "only older spellings")
    if not isinstance(layer, Mapping):
        yield Found("config.json: transformer_layer_config", "the settings of the draft's layer", "nothing")


@rule(
    "SPECULATORS_HIDDEN",
    "error",
    "a stray model_type hides the speculators config",
    story="vLLM takes a draft for the speculators layout only where config.json has no model_type of its own. With "
    "`model_type: llama` it reads the file as a plain config, finds no sizes at the top and fills in a 7B Llama's.",
    fix="remove the top-level `model_type`",
    source="vLLM 0.33.0 transformers_utils/config.py:360-367",
    needs=("vllm",),
)
def speculators_hidden(subject: Subject) -> Iterator[Found]:
    kind = subject.raw.get("model_type")
    if subject.raw.get("speculators_config") is not None and kind not in (None, "speculators"):
        repair = Repair(unset=(("model_type",),))
        yield Found("config.json: model_type", "no such key, or speculators", brief(kind), repair=repair)


@rule(
    "SPECULATORS_VERSION",
    "error",
    "this vLLM does not read a part of the speculators layout",
    story="The reader of this layout learned its parts one by one: P-EAGLE heads, and flags that the plain config knew "
    "earlier. Before that a kind is refused and a flag is lost without a word.",
    fix="use the release named, or convert the head to the vllm layout",
    source="vLLM 0.19.0, 0.22.0, 0.24.0, 0.25.0 transformers_utils/configs/speculators/algos.py",
    needs=("vllm",),
    since="peagle: before 0.22 (0.24 for qwen3 layers); norm_before_fc: before 0.19; fc_norm, norm_output: before 0.25",
)
def speculators_version(subject: Subject) -> Iterator[Found]:
    if not subject.is_speculators:
        return
    first_peagle = (0, 24) if subject.block == "qwen3" else (0, 22)
    if subject.raw.get("speculators_model_type") == "peagle" and subject.version < first_peagle:
        expected = f"eagle3, or vLLM {release(first_peagle)}"
        yield Found("config.json: speculators_model_type", expected, f"peagle, and vLLM {release(subject.version)}")
        return
    for flag, first in FLAGS_SINCE.items():
        if subject.raw.get(flag) is True and subject.version < first:
            found = f"true, and vLLM {release(subject.version)}"
            yield Found(f"config.json: {flag}", f"false, or vLLM {release(first)}", found)


@rule(
    "SPECULATORS_SGLANG",
    "error",
    "SGLang does not read the speculators layout",
    story="SGLang reads sizes, layer ids and flags at the top of config.json. In the speculators layout they are "
    "nested, so it finds none.",
    fix="`specctl convert DRAFT OUT --to sglang`",
    source="sglang 0.5.23 models/llama_eagle3.py",
    needs=("sglang",),
)
def speculators_sglang(subject: Subject) -> Iterator[Found]:
    if "speculators_config" in subject.raw or "speculators_model_type" in subject.raw:
        yield Found("config.json: speculators_config", "a plain config", "the speculators layout")


RULES = rules_in(globals())

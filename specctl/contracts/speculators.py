"""Rules on the speculators layout as vLLM reads it."""

from collections.abc import Iterator, Mapping
from typing import Final

from specctl.files.subject import Subject, brief
from specctl.records.contract import Found, Repair, rule, rules_in

SPECULATORS_KINDS: Final = ("eagle3", "peagle")


@rule(
    "SPECULATORS_INCOMPLETE",
    "error",
    "a speculators config lacks what vLLM needs",
    story="vLLM reads the speculators layout through its own parser, which needs the proposal, the verifier, the "
    "kind of head and the layer's settings, and stops with `Invalid speculators config structure` otherwise. "
    "A P-EAGLE head also needs `mask_token_id`.",
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
        yield Found(
            "config.json: speculators_config.proposal_methods", "one with `speculative_tokens`", brief(proposals)
        )
    if not (isinstance(verifier, Mapping) and isinstance(verifier.get("name_or_path"), str)):
        yield Found("config.json: speculators_config.verifier", "one with `name_or_path`", brief(verifier))
    kind = subject.raw.get("speculators_model_type")
    if kind not in SPECULATORS_KINDS:
        yield Found("config.json: speculators_model_type", "eagle3 or peagle", brief(kind))
    if not isinstance(subject.raw.get("transformer_layer_config"), Mapping):
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
    if "speculators_config" in subject.raw and kind not in (None, "speculators"):
        repair = Repair(unset=(("model_type",),))
        yield Found("config.json: model_type", "no such key, or speculators", brief(kind), repair=repair)


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

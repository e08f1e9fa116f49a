"""Rules on a draft beside its target: vocabularies, widths, ends of text, and who runs the pair over stages."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.contracts._vocabmap import is_absolute, is_unfilled, map_targets
from specctl.files.serverview import release
from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.runtimes import (
    SGLANG_TARGETS,
    VLLM_FAMILIES_TO,
    VLLM_RELAY_SINCE,
    VLLM_RELAY_TARGETS,
    VLLM_TARGET_FAMILIES,
    VLLM_TARGETS_WITHOUT,
)


@rule(
    "VOCAB_SIZE_DIFFERS",
    "error",
    "vocab_size is not the target's",
    story="Three numbers pass for a vocabulary: the tokenizer's length, config.vocab_size, the rows of the "
    "embedding. A draft's `vocab_size` is the target's config.vocab_size; one that is off by one, padded "
    "differently or reduced makes an embedding and logits of another width.",
    fix="set `vocab_size` to the target's; the reduced size belongs in `draft_vocab_size`",
    source="sgl-project/SpecForge e07da1df; vllm-project/speculators#188; vllm-project/vllm#55133",
    needs=("target",),
)
def vocab_size_differs(subject: Subject) -> Iterator[Found]:
    head, target = subject.head, subject.target
    if head is not None and target is not None and head.vocab_size != target.vocab_size:
        yield Found("config.json: vocab_size", f"{target.vocab_size}, as the target", str(head.vocab_size))


@rule(
    "HIDDEN_SIZE_DIFFERS",
    "error",
    "the draft expects states of another width",
    story="fc reads the target's states, so `target_hidden_size` (or, where it is not said, the draft's own "
    "`hidden_size`) is the target's width. Another width belongs to another target.",
    fix="use the target this head was trained on",
    source="vLLM 0.33.0 models/llama_eagle3.py:218; vllm-project/vllm#19174",
    needs=("target",),
)
def hidden_size_differs(subject: Subject) -> Iterator[Found]:
    head, target = subject.head, subject.target
    if head is not None and target is not None and head.target_hidden_size != target.hidden_size:
        key = "target_hidden_size" if subject.settings.get("target_hidden_size") is not None else "hidden_size"
        yield Found(f"config.json: {key}", f"{target.hidden_size}, as the target", str(head.target_hidden_size))


@rule(
    "EOS_OUT_OF_RANGE",
    "error",
    "an end-of-sequence id beyond the vocabulary",
    story="Configs that are copied from another family keep that family's ids. An id that the vocabulary does not "
    "have never ends a text, and tools that index with it fail.",
    fix="write the target's eos_token_id",
    source="sgl-project/SpecForge configs/deepseek-v3-671b-eagle3.json, ling-flash-2.0-eagle3.json",
)
def eos_out_of_range(subject: Subject) -> Iterator[Found]:
    vocab = subject.vocab_size
    ends = subject.settings.get("eos_token_id")
    for eos in ends if isinstance(ends, list) else [ends]:
        if vocab is not None and type(eos) is int and not 0 <= eos < vocab:
            expected = f"ids from 0 to {vocab - 1} (vocab_size {vocab})"
            yield Found("config.json: eos_token_id", expected, str(eos), repair=_own_eos(subject))


@rule(
    "EOS_NULL",
    "warning",
    "eos_token_id is null",
    story="Without an end-of-sequence id tools that build a vocabulary map from the config leave it out of the "
    "draft's vocabulary, and the draft can never propose the end of a text.",
    fix="write the target's eos_token_id",
    source="sgl-project/SpecForge configs",
)
def eos_null(subject: Subject) -> Iterator[Found]:
    if "eos_token_id" in subject.settings and subject.settings["eos_token_id"] is None:
        yield Found("config.json: eos_token_id", "a token id", "null", repair=_own_eos(subject))


@rule(
    "TOKEN_OUT_OF_RANGE",
    "error",
    "a special token id beyond the vocabulary",
    story="As with eos_token_id: an id of another family's vocabulary, which the embedding does not have a row for.",
    fix="write the target's ids",
    source="sgl-project/SpecForge configs",
)
def token_out_of_range(subject: Subject) -> Iterator[Found]:
    vocab = subject.vocab_size
    for key in ("bos_token_id", "pad_token_id"):
        token = subject.settings.get(key)
        if vocab is not None and type(token) is int and not 0 <= token < vocab:
            # -1 is how some configs say "none".
            if key == "pad_token_id" and token == -1:
                continue
            yield Found(f"config.json: {key}", f"ids from 0 to {vocab - 1} (vocab_size {vocab})", str(token))


@rule(
    "EOS_NOT_DRAFTED",
    "warning",
    "the draft cannot propose the end of the text",
    story="The target ends its answers with a token that is not in the draft's vocabulary. Each answer then costs "
    "one rejected draft at its end, many more for short answers.",
    fix="put the target's end tokens into the vocabulary map and train with it",
    source="docs/design.md, Conventions",
    needs=("target",),
)
def eos_not_drafted(subject: Subject) -> Iterator[Found]:
    head, target, offsets = subject.head, subject.target, subject.d2t
    if (
        head is None
        or target is None
        or offsets is None
        or not head.is_reduced
        or len(offsets) != head.draft_vocab_size
    ):
        return
    targets = map_targets(subject)
    if targets is None or is_unfilled(subject) or is_absolute(subject):
        return
    drafted = set(targets.tolist())
    if min(drafted) < 0 or max(drafted) >= head.vocab_size:
        return
    missing = [eos for eos in target.eos_token_ids if eos not in drafted and eos < head.vocab_size]
    if missing:
        found = f"{len(drafted)} tokens without {', '.join(map(str, missing))}"
        yield Found(subject.place("d2t"), f"the target's end tokens {_list(target.eos_token_ids)}", found)


@rule(
    "TARGET_CLASS",
    "error",
    "the runtime hands out no hidden states for this target",
    story="A target has to let the runtime capture its states. vLLM stops after loading with `Model does not support "
    "EAGLE3 interface`, SGLang with `does not implement set_eagle3_layers_to_capture`.",
    fix="serve the pair with the other runtime, or with vLLM's `--model-impl transformers`",
    source="vLLM 0.33.0 eagle3_utils.py:28; sglang 0.5.23 attention_backend_setup.py:54-60",
    needs=("target",),
)
def target_class(subject: Subject) -> Iterator[Found]:
    target = subject.target
    if target is None:
        return
    if subject.runtime == "vllm":
        is_refused = target.architecture in VLLM_TARGETS_WITHOUT
    else:
        is_refused = target.architecture not in SGLANG_TARGETS
    if is_refused:
        yield Found(f"target {target.name}", f"a class that {subject.runtime} captures states of", target.architecture)
    elif subject.runtime == "vllm" and subject.version < VLLM_FAMILIES_TO:
        known = [name for first, names in VLLM_TARGET_FAMILIES if first <= subject.version for name in names.split()]
        if not any(name in target.model_type for name in known):
            expected = f"a model_type with one of {', '.join(known)} before vLLM 0.22"
            yield Found(f"target {target.name}", expected, target.model_type, fix="use vLLM 0.22 or newer")


@rule(
    "PP_RELAY",
    "error",
    "this vLLM passes no states between stages",
    story="Captured states of the first stages have to travel to the last, which runs the draft, and so does the "
    "target's embedding if the draft has none. vLLM does both from 0.30 on. Before, the last stage lacks the states "
    "and a borrowed embedding is uninitialised memory.",
    fix="use vLLM 0.30 or newer, or one pipeline stage",
    source="vLLM 0.30.0 models/utils.py:839, models/llama.py:358",
    needs=("vllm", "pp"),
    since="vLLM before 0.30",
)
def pp_relay(subject: Subject) -> Iterator[Found]:
    if subject.version < VLLM_RELAY_SINCE:
        lacks = ", and the draft has no embedding of its own" if "embed_tokens.weight" not in subject.tensors else ""
        yield Found("--pp", "vLLM 0.30 or newer", f"vLLM {release(subject.version)}{lacks}")


@rule(
    "PP_TARGET",
    "error",
    "vLLM does not relay states for this target's class",
    story="Each model class of vLLM opts in to passing captured states between stages. The others stop with `does "
    "not support eagle3 with pipeline parallelism`, and so does every target run by the Transformers backend.",
    fix="use one pipeline stage (tensor parallelism is fine), or a newer vLLM (vllm-project/vllm#66546)",
    source="vLLM 0.33.0 eagle3_utils.py:48-63",
    needs=("vllm", "pp", "target"),
)
def pp_target(subject: Subject) -> Iterator[Found]:
    target = subject.target
    if target is None or subject.version < VLLM_RELAY_SINCE or target.architecture in VLLM_RELAY_TARGETS:
        return
    if target.architecture not in VLLM_TARGETS_WITHOUT and not subject.is_parallel:
        yield Found(f"target {target.name}", f"a class that relays, for --pp {subject.pp}", target.architecture)


@rule(
    "PP_SGLANG",
    "error",
    "SGLang runs EAGLE-3 in one pipeline stage only",
    story="SGLang refuses the combination when it starts: `Pipeline parallelism currently only supports EAGLE "
    "(non-multi-layer) speculative decoding`. EAGLE-3 aux capture under PP is not supported.",
    fix="use one pipeline stage, or vLLM 0.30 or newer",
    source="sglang 0.5.23 arg_groups/validation_hook.py:131-138",
    needs=("sglang", "pp"),
)
def pp_sglang(subject: Subject) -> Iterator[Found]:
    yield Found("--pp", "1 with SGLang: EAGLE-3 aux capture under PP is not supported", str(subject.pp))


def _own_eos(subject: Subject) -> Repair | None:
    target = subject.target
    if target is None or not target.eos_token_ids or subject.is_speculators:
        return None
    ids = list(target.eos_token_ids)
    return Repair(set={("eos_token_id",): ids[0] if len(ids) == 1 else ids})


def _list(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


RULES = rules_in(globals())

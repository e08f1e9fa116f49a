"""Rules on who can run a P-EAGLE head."""

from collections.abc import Iterator
from typing import Final

from specctl.files.serverview import release
from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.runtimes import Version

PARALLEL_SINCE: Final[Version] = (0, 16)
QWEN3_SINCE: Final[Version] = (0, 24)


@rule(
    "PARALLEL_SGLANG",
    "error",
    "SGLang cannot serve P-EAGLE heads",
    story="SGLang has no parallel drafting: it would load the head as a plain EAGLE-3 one, skip the learned mask and "
    "draft step by step with layers that were never trained for it.",
    fix="serve it with vLLM >= 0.16, or train an EAGLE-3 head for SGLang",
    source="NVIDIA-NeMo/Automodel#2376; sgl-project/sglang#23171",
    needs=("sglang",),
)
def parallel_sglang(subject: Subject) -> Iterator[Found]:
    if subject.is_parallel:
        yield Found(
            "the head", "an EAGLE-3 head", "a P-EAGLE head: SGLang cannot serve P-EAGLE heads; use vLLM >= 0.16"
        )


@rule(
    "PARALLEL_VERSION",
    "error",
    "this vLLM has no parallel drafting",
    story="P-EAGLE came with vLLM 0.16 for Llama layers and with 0.24 for Qwen3 ones. Older releases stop at the "
    "mask, or run the head step by step.",
    fix="use the release named, or newer",
    source="vLLM 0.16.0 config/speculative.py:123; vLLM 0.24.0 models/qwen3_eagle3.py:434",
    needs=("vllm",),
    since="vLLM before 0.16; before 0.24 for Qwen3 layers",
)
def parallelrelease(subject: Subject) -> Iterator[Found]:
    first = QWEN3_SINCE if subject.block == "qwen3" else PARALLEL_SINCE
    # The speculators layout has releases of its own (SPECULATORS_VERSION).
    if subject.is_parallel and subject.version < first and not subject.is_speculators:
        yield Found(
            "the head", f"vLLM {release(first)} or newer for a P-EAGLE head", f"vLLM {release(subject.version)}"
        )


@rule(
    "PARALLEL_PP",
    "error",
    "vLLM runs no P-EAGLE head over pipeline stages",
    story="Parallel drafting runs in vLLM's V1 runner, which does not pass the captured states between stages. The "
    "last stage stops with `Missing aux_hidden_states_0 from PP intermediate tensors`.",
    fix="serve with one pipeline stage (tensor parallelism is fine), or serve an EAGLE-3 head",
    source="vLLM 0.33.0 models/interfaces.py:1663-1680, config/vllm.py:3070-3077",
    needs=("vllm", "pp"),
    since="vLLM up to 0.33",
)
def parallel_pp(subject: Subject) -> Iterator[Found]:
    if subject.is_parallel and subject.version[:2] <= (0, 33):
        yield Found("the head", "an EAGLE-3 head for --pp above 1", f"a P-EAGLE head with --pp {subject.pp}")


@rule(
    "PARALLEL_CLASS",
    "error",
    "the DeepSeek draft class has no parallel drafting",
    story="vLLM's draft for DeepSeek layers has no place for the learned mask and stops at its name.",
    fix="train the P-EAGLE head with Llama or Qwen3 layers",
    source="vLLM 0.33.0 models/deepseek_eagle3.py",
    needs=("vllm",),
)
def parallel_class(subject: Subject) -> Iterator[Found]:
    if subject.is_parallel and any("Deepseek" in name for name in subject.classes):
        yield Found("config.json: architectures", "a Llama or Qwen3 draft class", subject.classes[0])


@rule(
    "PARALLEL_UNFUSED",
    "error",
    "parallel drafting without fused states",
    story="With `use_aux_hidden_state: false` vLLM builds no fc, and its parallel path asks for fc's width: "
    "AttributeError: fc_input_size while the weights load.",
    fix="train the head with fused states",
    source="vLLM 0.33.0 models/llama_eagle3.py:209-221,352",
    needs=("vllm",),
)
def parallel_unfused(subject: Subject) -> Iterator[Found]:
    if subject.is_parallel and subject.head is not None and not subject.head.use_aux and subject.block == "llama":
        yield Found("config.json: eagle_config.use_aux_hidden_state", "true for a P-EAGLE head", "false")


@rule(
    "PARALLEL_UNFLAGGED",
    "warning",
    "a learned mask, and no parallel_drafting flag",
    story="The head has `mask_hidden`, which only parallel drafting uses, and config.json does not say so. vLLM goes "
    "by its own command line only and, without the flag there, skips the mask with a warning and drafts step by step.",
    fix='write "parallel_drafting": true, and pass it in --speculative-config too',
    source="vLLM 0.33.0 models/llama_eagle3.py:450-464; NVIDIA-NeMo/Automodel#2376",
)
def parallel_unflagged(subject: Subject) -> Iterator[Found]:
    if subject.is_speculators or "mask_hidden" not in subject.tensors or not subject.checkpoint.has_config:
        return
    if subject.raw.get("parallel_drafting") is not True:
        repair = Repair(set={("parallel_drafting",): True})
        found = "`mask_hidden` in the weights, and no flag"
        yield Found("config.json: parallel_drafting", "true", found, repair=repair)


@rule(
    "PARALLEL_DEPTHS_DIFFER",
    "warning",
    "config.json says two numbers of drafted tokens",
    story="`num_draft_tokens` and `num_depths` both name the depths a head was trained for. Asked for more than it "
    "learned, a head guesses noise at the end of every draft; nobody checks.",
    fix="keep the number it was trained with",
    source="NVIDIA-NeMo/Automodel peagle_recipe.py:73-84; NVIDIA-NeMo/Automodel#2376",
)
def parallel_depths_differ(subject: Subject) -> Iterator[Found]:
    one, other = subject.raw.get("num_draft_tokens"), subject.raw.get("num_depths")
    if subject.is_parallel and one is not None and other is not None and one != other:
        yield Found("config.json: num_depths", f"{one}, as num_draft_tokens", str(other))


@rule(
    "PARALLEL_DEPTHS",
    "note",
    "config.json does not say how many tokens it drafts",
    story="A P-EAGLE head is trained for a number of tokens at once. vLLM does not check what it is asked for; past "
    "the trained depth the guesses are worthless and cost time.",
    fix="write `num_draft_tokens`, and ask the server for no more",
    source="vLLM 0.33.0 v1/spec_decode/llm_base_proposer.py; NVIDIA-NeMo/Automodel#2376",
)
def parallel_depths(subject: Subject) -> Iterator[Found]:
    keys = ("num_draft_tokens", "num_depths")
    if subject.is_parallel and not subject.is_speculators and all(subject.raw.get(key) is None for key in keys):
        yield Found("config.json: num_draft_tokens", "the depths it was trained for", "nothing")


RULES = rules_in(globals())

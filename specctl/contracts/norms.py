"""Rules on the norms around fc and the residual: flags, the tensors they promise, and who reads them."""

from collections.abc import Iterator, Mapping

from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.runtimes import Runtime, Version

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NEWER: Mapping[Runtime, Mapping[str, Version]] = {
    "vllm": {"norm_before_fc": (0, 18), "fc_norm": (0, 22), "norm_output": (0, 22)},
    "sglang": {"norm_before_fc": (0, 5, 17), "fc_norm": (0, 5, 12), "norm_output": (0, 5, 12)},
}
"""First release that reads the flag, of those that were read."""


NESTED_SINCE: Mapping[Runtime, Version] = {"vllm": (0, 22), "sglang": (0, 5, 17)}
"""First release that reads `norm_before_fc` in `eagle_config` too."""


@rule(
    "FC_NORM_MISSING",
    "error",
    "fc_norm is on and its norms are missing",
    story="With `fc_norm` each fused state has a norm of its own before fc. A norm that is not in the weights is all "
    "ones, so the states reach fc at another scale than in training, without a message.",
    fix="export the head with fc_norm.0 to fc_norm.N, or set the flag to false if it was trained without",
    source="vLLM 0.33.0 models/llama_eagle3.py:231",
)
def fc_norm_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or not head.fc_norm or not subject.tensors or (head.norm_before_fc and not _per_state(subject)):
        return
    missing = [i for i in range(head.num_aux) if f"fc_norm.{i}.weight" not in subject.tensors]
    if missing:
        more = f", nor {len(missing) - 1} of the others" if len(missing) > 1 else ""
        expected = f"`fc_norm.{missing[0]}.weight` [{head.target_hidden_size}]"
        yield Found("the weights", expected, f"no such tensor{more}")


@rule(
    "FC_NORM_UNFLAGGED",
    "error",
    "norms before fc are there and their flag is not",
    story="The head was trained with one norm per fused state and config.json does not say so. vLLM stops at the "
    "names it has no place for; SGLang skips them and runs the head without its norms.",
    fix="set `fc_norm` to true",
    source="vLLM 0.33.0 models/llama_eagle3.py:231, utils.py:442; NVIDIA-NeMo/Automodel#2897",
)
def fc_norm_unflagged(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or head.fc_norm or _is_nested(subject, "fc_norm") or _is_peagle_file(subject):
        return
    if _per_state(subject):
        repair = Repair(set={("fc_norm",): True})
        name = min(n for n in subject.tensors if n.startswith("fc_norm."))
        yield Found("config.json: fc_norm", "true", f"not true, and `{name}` in the weights", repair=repair)


@rule(
    "INPUT_NORM_MISSING",
    "error",
    "norm_before_fc is on and its norm is missing",
    story="With `norm_before_fc` one norm runs over all fused states before fc. If it is not in the weights it is "
    "all ones and nobody says so.",
    fix="export the head with input_norm.weight, or set the flag to false if it was trained without",
    source="vLLM 0.33.0 models/llama_eagle3.py:184-188",
)
def input_norm_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or not head.norm_before_fc or "input_norm.weight" in subject.tensors or not subject.tensors:
        return
    if not head.fc_norm:
        yield Found("the weights", f"`input_norm.weight` [{head.fc_width}]", "no such tensor")


@rule(
    "INPUT_NORM_UNFLAGGED",
    "error",
    "input_norm is there and its flag is not",
    story="vLLM drops `input_norm` without a message unless `norm_before_fc` is true, and feeds fc un-normed states. "
    "Training and serving differ, the server looks healthy.",
    fix="set `norm_before_fc` to true",
    source="vLLM 0.33.0 models/llama_eagle3.py:464; vllm-project/vllm#42143",
)
def input_norm_unflagged(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and not head.norm_before_fc and "input_norm.weight" in subject.tensors:
        repair = Repair(set={("norm_before_fc",): True})
        yield Found(
            "config.json: norm_before_fc", "true", "not true, and `input_norm.weight` in the weights", repair=repair
        )


@rule(
    "NORMS_BOTH",
    "error",
    "two exclusive norms before fc are on",
    story="`fc_norm` norms each state, `norm_before_fc` all of them together. Trainers allow one of the two; vLLM "
    "applies both if both are set.",
    fix="keep the one the head was trained with",
    source="speculators 0.9.0 eagle3/config.py; vLLM 0.33.0 models/llama_eagle3.py:184-231",
)
def norms_both(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.fc_norm and head.norm_before_fc:
        has = {"fc_norm": _per_state(subject), "norm_before_fc": "input_norm.weight" in subject.tensors}
        off = [flag for flag, is_there in has.items() if not is_there]
        repair = Repair(set={(off[0],): False}) if len(off) == 1 and not subject.is_speculators else None
        found = "both true" + (f", and tensors only for `{(set(has) - set(off)).pop()}`" if len(off) == 1 else "")
        yield Found("config.json: fc_norm", "one of `fc_norm` and `norm_before_fc`", found, repair=repair)


@rule(
    "NORM_NESTED",
    "error",
    "a norm flag stands where the runtime does not read it",
    story="Trainers put their flags into `eagle_config`. vLLM reads `norm_before_fc` there (from 0.22 on) and the "
    "others at the top only, so a nested `norm_output` or `fc_norm` is lost without a word.",
    fix="write the flag at the top of config.json",
    source="vllm-project/vllm#42143; vLLM 0.33.0 models/llama_eagle3.py:101,184-188,231,252",
)
def norm_nested(subject: Subject) -> Iterator[Found]:
    eagle = subject.raw.get("eagle_config")
    if not isinstance(eagle, Mapping) or subject.is_speculators:
        return
    for flag in FLAGS:
        reads_nested = flag == "norm_before_fc" and subject.version >= NESTED_SINCE[subject.runtime]
        if type(eagle.get(flag)) is bool and eagle[flag] and subject.raw.get(flag) is None and not reads_nested:
            repair = Repair(set={(flag,): eagle[flag]})
            yield Found(
                f"config.json: eagle_config.{flag}", f"`{flag}` at the top", "only the nested one", repair=repair
            )


@rule(
    "NORM_CONTRADICTS",
    "error",
    "a norm flag is said twice, differently",
    story="The flag at the top and the one in `eagle_config` disagree. vLLM follows the nested `norm_before_fc` and "
    "the top-level value of the others.",
    fix="write the value the head was trained with in both places",
    source="vLLM 0.33.0 models/llama_eagle3.py:184-188",
)
def norm_contradicts(subject: Subject) -> Iterator[Found]:
    eagle = subject.raw.get("eagle_config")
    for flag in FLAGS:
        top, nested = subject.raw.get(flag), eagle.get(flag) if isinstance(eagle, Mapping) else None
        if type(top) is bool and type(nested) is bool and top != nested:
            yield Found(f"config.json: {flag}", f"{_word(nested)}, as in `eagle_config`", _word(top))


@rule(
    "NORM_RESIDUAL_IMPLICIT",
    "warning",
    "norm_before_residual is not said",
    story="Whether the residual is the normed state or the raw one changes every number of the head. Where the key "
    "is absent vLLM takes false in a plain config, true in a speculators eagle3 one and false in a peagle one.",
    fix="write the value the head was trained with",
    source="vLLM 0.33.0 models/llama_eagle3.py:101, speculators/algos.py:33,71",
    needs=("vllm",),
)
def norm_residual_implicit(subject: Subject) -> Iterator[Found]:
    if subject.is_speculators and subject.raw.get("norm_before_residual") is None and subject.head is not None:
        taken = _word(bool(subject.settings.get("norm_before_residual")))
        said = "null" if "norm_before_residual" in subject.raw else "no such key"
        yield Found("config.json: norm_before_residual", "true or false", f"{said}; vLLM takes {taken}")


@rule(
    "NORM_RESIDUAL_SGLANG",
    "error",
    "SGLang always takes the raw residual",
    story="SGLang's draft layer adds the un-normed state, whatever `norm_before_residual` says. A head trained with "
    "the normed one computes something else there.",
    fix="serve this head with vLLM",
    source="sglang 0.5.23 models/llama_eagle3.py:97-102",
    needs=("sglang",),
)
def norm_residual_sglang(subject: Subject) -> Iterator[Found]:
    if subject.head is not None and subject.head.norm_before_residual:
        yield Found("config.json: norm_before_residual", "false", "true")


@rule(
    "NORM_OUTPUT_MEANING",
    "warning",
    "norm_output means another thing to this trainer",
    story="SpecForge up to 0.2 writes `norm_output: true` for a norm before lm_head, which every runtime applies "
    "anyway. To vLLM and SGLang it means that the normed state is fed to the next step: training used the raw "
    "one, and every position after the first loses acceptance.",
    fix="set `norm_output` to false, unless the head was trained with the normed state fed back",
    source="sgl-project/SpecForge#879; vLLM 0.33.0 models/llama_eagle3.py:252,286",
)
def norm_output_meaning(subject: Subject) -> Iterator[Found]:
    if subject.layout == "specforge" and subject.raw.get("norm_output") is True and not subject.is_parallel:
        yield Found("config.json: norm_output", "false for a head of SpecForge up to 0.2", "true")


@rule(
    "NORM_VERSION",
    "error",
    "this release does not read a flag the head needs",
    story="Flags for newer heads were added one by one. An older release builds the head without them and either "
    "stops at the norms' tensors or runs without.",
    fix="use the release named, or newer",
    source="vLLM 0.18.0 and 0.22.0, sglang 0.5.12 and 0.5.17 models/llama_eagle3.py",
    since="norm_before_fc: vLLM before 0.18, SGLang before 0.5.17; fc_norm, norm_output: before 0.22, before 0.5.12",
)
def normrelease(subject: Subject) -> Iterator[Found]:
    for flag, first in NEWER[subject.runtime].items() if not subject.is_speculators else ():
        if subject.head is not None and getattr(subject.head, flag) and subject.version < first:
            release = ".".join(map(str, first))
            found = f"true, and {subject.runtime} {'.'.join(map(str, subject.version))}"
            yield Found(f"config.json: {flag}", f"false, or {subject.runtime} {release}", found)


@rule(
    "NORMS_SPECULATORS_PEAGLE",
    "error",
    "vLLM drops norm flags of a speculators P-EAGLE head",
    story="vLLM's reader for this layout passes on `norm_before_residual` and `norm_before_fc` and neither `fc_norm` "
    "nor `norm_output`. A head trained with `fc_norm` then stops at the norms' tensors.",
    fix="`specctl convert DRAFT OUT --to vllm`, which keeps the flags",
    source="vLLM 0.33.0 transformers_utils/configs/speculators/algos.py:60-85",
    needs=("vllm",),
)
def norms_speculators_peagle(subject: Subject) -> Iterator[Found]:
    if _is_peagle_file(subject) and _per_state(subject):
        yield Found("config.json: fc_norm", "no norm per state in this layout", "`fc_norm.0.weight` in the weights")


def _per_state(subject: Subject) -> bool:
    return any(name.startswith("fc_norm.") for name in subject.tensors)


def _is_nested(subject: Subject, flag: str) -> bool:
    eagle = subject.raw.get("eagle_config")
    return isinstance(eagle, Mapping) and eagle.get(flag) is True


def _is_peagle_file(subject: Subject) -> bool:
    return subject.is_speculators and subject.raw.get("speculators_model_type") == "peagle"


def _word(flag: bool) -> str:
    return "true" if flag else "false"


RULES = rules_in(globals())

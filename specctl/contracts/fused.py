"""Rules on how many states are fused, and on boundaries that some releases cannot capture."""

from collections.abc import Iterator

from specctl.contracts._layerids import fc_fits, ids_text, nested_ids, top_ids, where_ids
from specctl.files.subject import Subject
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.head import DEFAULT_AUX_COUNT

LAYER_ZERO_BROKEN_TO = (0, 33)
"""The last release read in which an in-place norm overwrites the captured embeddings."""


@rule(
    "AUX_LAYERS_ZERO",
    "error",
    "this vLLM overwrites the embeddings it captures",
    story="Boundary 0 is the input embedding. Up to 0.33 vLLM keeps a reference to it, and the fused norm of the "
    "first layer then writes over that memory; the Transformers backend stops with KeyError: -1. The draft reads "
    "noise where it learned embeddings.",
    fix="use a vLLM newer than 0.33 (vllm-project/vllm#66546)",
    source="vllm-project/vllm#66546; vLLM 0.33.0 models/interfaces.py:1647-1649",
    needs=("vllm",),
    since="vLLM up to 0.33",
)
def aux_layers_zero(subject: Subject) -> Iterator[Found]:
    ids = subject.effective_aux
    if ids is not None and 0 in ids and subject.version[:2] <= LAYER_ZERO_BROKEN_TO:
        yield Found(where_ids(subject), "no boundary 0 with vLLM up to 0.33", ids_text(ids))


@rule(
    "AUX_LAYERS_LAST",
    "error",
    "this vLLM never captures the last boundary",
    story="Before 0.18 vLLM's loop ends before the stream after the last layer, so that boundary is never handed out: "
    "fc gets fewer states than it has columns for.",
    fix="use vLLM 0.18 or newer",
    source="vLLM 0.17.0 models/llama.py:424-425, vLLM 0.18.0 models/interfaces.py:1282-1292",
    needs=("vllm", "target"),
    since="vLLM before 0.18",
)
def aux_layers_last(subject: Subject) -> Iterator[Found]:
    ids, target = subject.effective_aux, subject.target
    if ids is not None and target is not None and target.num_layers in ids and subject.version < (0, 18):
        yield Found(where_ids(subject), f"boundaries below {target.num_layers}", ids_text(ids))


@rule(
    "AUX_COUNT_DIFFERS",
    "error",
    "ids and num_aux_hidden_states disagree",
    story="vLLM sizes fc by `num_aux_hidden_states` and captures by the ids. When the two differ the first step "
    "multiplies matrices that do not fit.",
    fix="set `num_aux_hidden_states` to the number of ids",
    source="vLLM 0.33.0 models/llama_eagle3.py:209-221",
)
def aux_count_differs(subject: Subject) -> Iterator[Found]:
    count, ids = subject.settings.get("num_aux_hidden_states"), top_ids(subject) or nested_ids(subject)
    if count is not None and ids is not None and len(set(ids)) == len(ids) and count != len(ids):
        is_sure = subject.head is not None and fc_fits(subject, len(ids))
        repair = Repair(set={subject.path("num_aux_hidden_states"): len(ids)}) if is_sure else None
        yield Found("config.json: num_aux_hidden_states", f"{len(ids)}, for {ids_text(ids)}", str(count), repair=repair)


@rule(
    "AUX_COUNT_IMPLICIT",
    "error",
    "other than three states, and no num_aux_hidden_states",
    story="vLLM's Llama draft counts the states by `num_aux_hidden_states`, then by the nested ids, then takes 3. It "
    "does not count the ids at the top, so fc is built for three states whatever they say.",
    fix="write `num_aux_hidden_states`",
    source="vLLM 0.33.0 models/llama_eagle3.py:209-221; speculators algos.py",
    needs=("vllm",),
)
def aux_count_implicit(subject: Subject) -> Iterator[Found]:
    top, nested = top_ids(subject), nested_ids(subject)
    if top is None or nested is not None or subject.settings.get("num_aux_hidden_states") is not None:
        return
    if len(top) == DEFAULT_AUX_COUNT or subject.block == "qwen3" or len(set(top)) != len(top):
        return
    path = ("transformer_layer_config",) if subject.is_speculators else ()
    repair = Repair(set={(*path, "num_aux_hidden_states"): len(top)})
    where = "config.json: " + ".".join((*path, "num_aux_hidden_states"))
    yield Found(where, f"{len(top)}, for {ids_text(top)}", "nothing, so vLLM takes 3", repair=repair)


RULES = rules_in(globals())

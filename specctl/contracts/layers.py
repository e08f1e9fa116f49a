"""Rules on the layers whose states the draft reads: are they said, in order, and read as they were meant."""

from collections.abc import Iterator

from specctl.files.reorder import states_in_order
from specctl.files.subject import Subject
from specctl.records.contract import Found, Level, Repair, rule, rules_in
from specctl.records.head import DEFAULT_AUX_COUNT

IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_ZERO_BROKEN_TO = (0, 33)
"""The last release read in which an in-place norm overwrites the captured embeddings."""


@rule(
    "AUX_LAYERS_IMPLICIT",
    "warning",
    "config.json does not say which layers the draft reads",
    story="Without ids both runtimes guess 2, N/2 and N-3 and log nothing that stands out. A published head served "
    "on guessed layers accepted 1.2 % instead of 58.9 %, with a healthy server and correct output.",
    fix="write the boundary ids the head was trained on as `eagle_aux_hidden_state_layer_ids`",
    source="vllm-project/vllm#50170; vLLM 0.33.0 models/interfaces.py:1751-1772",
)
def aux_layers_implicit(subject: Subject) -> Iterator[Found]:
    if (
        not subject.checkpoint.has_config
        or _is_said(subject)
        or (subject.head is not None and not subject.head.use_aux)
    ):
        return
    guess = subject.default_aux
    if guess is not None:
        found = f"nothing; {subject.runtime} will read boundaries {_ids(guess)}"
    elif subject.target is not None:
        found = f"nothing, and a target of {subject.target.num_layers} layers is too shallow for the default"
    else:
        found = "nothing; the runtime will read 2, N/2 and N-3"
    yield Found(f"config.json: {IDS}", "the ids the head was trained on", found)


@rule(
    "AUX_LAYERS_NESTED",
    "warning",
    "layer ids stand where vLLM reads them wrongly or not",
    story="In `eagle_config` the ids mean the output of layer i, counted from 0, as SGLang and the trainers count. "
    "vLLM's V2 runner does not look there and takes its default; the V1 runner, which runs parallel drafting, takes "
    "the numbers as boundaries, one layer too early.",
    fix="write boundary ids (output of layer i is i + 1) at the top of config.json too",
    source="vLLM 0.33.0 eagle3_utils.py:142-147, gpu_model_runner.py:5218-5219",
    needs=("vllm",),
)
def aux_layers_nested(subject: Subject) -> Iterator[Found]:
    nested = _nested(subject)
    if nested is None or _top(subject) is not None:
        return
    meant, read = subject.declared_aux, subject.effective_aux
    level: Level = "error" if meant is not None and read is not None and meant != read else "warning"
    takes = f"boundaries {_ids(read)}" if read else "2, N/2 and N-3"
    yield Found(
        f"config.json: eagle_config.{IDS}",
        f"`{IDS}` at the top" + (f", {_ids(meant)}" if meant else ""),
        f"only the nested {_ids(nested)}; vLLM will read {takes}",
        level=level,
        repair=Repair(set={(IDS,): list(meant)}) if meant else None,
    )


@rule(
    "AUX_LAYERS_TOP_SGLANG",
    "error",
    "layer ids stand where SGLang does not read them",
    story="SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids` only, as the output of layer i counted from "
    "0. It passes over the ids at the top and takes its default layers.",
    fix="write them into `eagle_config` too, each one less than the boundary id",
    source="sglang 0.5.23 spec_aux_hidden_state.py, models/llama.py:939-941",
    needs=("sglang",),
)
def aux_layers_top_sglang(subject: Subject) -> Iterator[Found]:
    top = _top(subject)
    if top is None or _nested(subject) is not None or subject.is_speculators or min(top) < 1:
        return
    same = subject.default_aux == tuple(top)
    repair = Repair(set={("eagle_config", IDS): [i - 1 for i in top]})
    found = "only the ids at the top" + (
        f"; SGLang will read {_ids(subject.default_aux)}" if subject.default_aux else ""
    )
    yield Found(
        f"config.json: eagle_config.{IDS}",
        _ids([i - 1 for i in top]),
        found,
        level="warning" if same else None,
        repair=repair,
    )


@rule(
    "AUX_LAYERS_CONTRADICT",
    "error",
    "the two lists of layer ids mean different layers",
    story="At the top of config.json ids are boundaries, in `eagle_config` outputs of layers counted from 0: the "
    "second list has to be the first less one. Where it is not, vLLM and SGLang run the head on different states "
    "and at most one is right.",
    fix="find out which layers the head was trained on and write both lists",
    source="vLLM 0.33.0 eagle3_utils.py:119; sglang 0.5.23 models/llama.py:939-941; vllm-project/vllm#43671",
)
def aux_layers_contradict(subject: Subject) -> Iterator[Found]:
    top, nested = _top(subject), _nested(subject)
    if top is not None and nested is not None and sorted(top) != sorted(i + 1 for i in nested):
        yield Found(
            f"config.json: eagle_config.{IDS}", f"{_ids([i - 1 for i in top])}, the top list less one", _ids(nested)
        )


@rule(
    "AUX_LAYERS_UNSORTED",
    "error",
    "layer ids are not in rising order",
    story="The columns of fc are in the order the trainer joined the states. Both runtimes join them in rising "
    "order of layers, whatever the list says, so each block of columns meets another layer's states.",
    fix="sort ids and blocks of fc together: `--fix`, or `specctl convert`",
    source="vLLM 0.33.0 models/interfaces.py:1617; vllm-project/vllm#50514",
)
def aux_layers_unsorted(subject: Subject) -> Iterator[Found]:
    ids = _top(subject) or _nested(subject)
    if ids is None or len(set(ids)) != len(ids) or ids == sorted(ids):
        return
    yield Found(_where(subject), _ids(sorted(ids)), _ids(ids), repair=_sorted(subject, ids))


@rule(
    "AUX_LAYERS_DUPLICATE",
    "error",
    "a layer id stands twice",
    story="The runtime captures each layer once, so fc gets fewer states than it has columns for and the server "
    "stops at the first step.",
    fix="list each id once; the head has to be trained so",
    source="vLLM 0.33.0 models/interfaces.py:1617",
)
def aux_layers_duplicate(subject: Subject) -> Iterator[Found]:
    ids = _top(subject) or _nested(subject)
    if ids is not None and len(set(ids)) != len(ids):
        yield Found(_where(subject), "each id once", _ids(ids))


@rule(
    "AUX_LAYERS_RANGE",
    "error",
    "a layer id that the target does not have",
    story="Boundaries run from 0, the embeddings, to N, the stream after the last layer. An id outside is never "
    "captured: no message, fewer states, and a failing matrix product at the first step.",
    fix="write the ids the head was trained on",
    source="vLLM 0.33.0 models/llama.py:425-456; lightseekorg/TorchSpec#87",
)
def aux_layers_range(subject: Subject) -> Iterator[Found]:
    top, nested = _top(subject), _nested(subject)
    ids = top if top is not None else [i + 1 for i in nested] if nested is not None else []
    last = subject.target.num_layers if subject.target is not None else None
    bad = [i for i in ids if i < 0 or (last is not None and i > last)]
    if bad:
        shown = bad[0] if top is not None else bad[0] - 1
        expected = f"boundaries from 0 to {last if last is not None else 'N'}"
        yield Found(_where(subject), expected, f"{shown}" + ("" if top is not None else " (output of a layer)"))


@rule(
    "AUX_LAYERS_ENDS_SGLANG",
    "error",
    "SGLang cannot capture the first or last boundary",
    story="SGLang adds one to each nested id and captures before the layer of that number. The embeddings "
    "(boundary 0) have no id there, and the stream after the last layer is never reached by its loop.",
    fix="serve this head with vLLM, or train one on inner layers",
    source="sglang 0.5.23 models/llama.py:939-941; sgl-project/sglang#25454",
    needs=("sglang",),
)
def aux_layers_ends_sglang(subject: Subject) -> Iterator[Found]:
    top, nested = _top(subject), _nested(subject)
    ids = [i + 1 for i in nested] if nested is not None else top or []
    last = subject.target.num_layers if subject.target is not None else None
    for i in sorted(set(ids) & {0, *([last] if last is not None else [])}):
        yield Found(_where(subject), "boundaries above 0 and below the target's last", f"boundary {i}")


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
        yield Found(_where(subject), "no boundary 0 with vLLM up to 0.33", _ids(ids))


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
    count, ids = subject.settings.get("num_aux_hidden_states"), _top(subject) or _nested(subject)
    if count is not None and ids is not None and len(set(ids)) == len(ids) and count != len(ids):
        fits = subject.head is not None and _fits(subject, len(ids))
        repair = Repair(set={("num_aux_hidden_states",): len(ids)}) if fits else None
        yield Found("config.json: num_aux_hidden_states", f"{len(ids)}, for {_ids(ids)}", str(count), repair=repair)


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
    top, nested = _top(subject), _nested(subject)
    if top is None or nested is not None or subject.settings.get("num_aux_hidden_states") is not None:
        return
    if len(top) == DEFAULT_AUX_COUNT or subject.block == "qwen3" or len(set(top)) != len(top):
        return
    path = ("transformer_layer_config",) if subject.is_speculators else ()
    repair = Repair(set={(*path, "num_aux_hidden_states"): len(top)})
    where = "config.json: " + ".".join((*path, "num_aux_hidden_states"))
    yield Found(where, f"{len(top)}, for {_ids(top)}", "nothing, so vLLM takes 3", repair=repair)


@rule(
    "AUX_COUNT_VERSION",
    "error",
    "this runtime fuses three states, no more and no less",
    story="Before 0.22 vLLM sizes fc for three states whatever config.json says, and stops at the head's shape.",
    fix="use vLLM 0.22 or newer",
    source="vLLM 0.21.0 and 0.22.0 models/llama_eagle3.py:179-190",
    needs=("vllm",),
    since="vLLM before 0.22",
)
def aux_countrelease(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is not None and head.num_aux != DEFAULT_AUX_COUNT and subject.version < (0, 22) and head.use_aux:
        yield Found("config.json: num_aux_hidden_states", "3 with vLLM before 0.22", str(head.num_aux))


def _top(subject: Subject) -> list[int] | None:
    ids = subject.settings.get(IDS)
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def _nested(subject: Subject) -> list[int] | None:
    eagle = subject.raw.get("eagle_config")
    ids = eagle.get(IDS) if isinstance(eagle, dict) and not subject.is_speculators else None
    return ids if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None


def _is_said(subject: Subject) -> bool:
    eagle = subject.raw.get("eagle_config")
    other = eagle.get("layer_ids") if isinstance(eagle, dict) else None
    return bool(_top(subject) or _nested(subject) or other or subject.misfits)


def _where(subject: Subject) -> str:
    return f"config.json: {IDS}" if _top(subject) is not None else f"config.json: eagle_config.{IDS}"


def _ids(ids: tuple[int, ...] | list[int] | None) -> str:
    return f"[{', '.join(map(str, ids or ()))}]"


def _fits(subject: Subject, count: int) -> bool:
    head, fc = subject.head, subject.tensors.get("fc.weight")
    return head is not None and fc is not None and fc.shape == (head.hidden_size, count * head.target_hidden_size)


def _sorted(subject: Subject, ids: list[int]) -> Repair | None:
    head = subject.head
    if head is None or not _fits(subject, len(ids)):
        return None
    changes = states_in_order(subject.tensors, ids, head.target_hidden_size)
    replace = {subject.names.get(name, name): source for name, source in changes.items()}
    lists = {(IDS,): _top(subject), ("eagle_config", IDS): _nested(subject)}
    return Repair(set={path: sorted(values) for path, values in lists.items() if values}, replace=replace)


RULES = rules_in(globals())

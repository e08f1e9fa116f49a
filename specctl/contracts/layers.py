"""Rules on the layers whose states the draft reads: are they said, in order, and read as they were meant."""

import math
from collections.abc import Iterator, Sequence

from specctl.contracts._layerids import IDS, fc_fits, ids_text, nested_ids, top_ids, where_ids
from specctl.files.reorder import states_in_order
from specctl.files.subject import Subject
from specctl.records.contract import Found, Level, Repair, rule, rules_in
from specctl.records.head import DEFAULT_AUX_COUNT

FIRST_DEFAULT = 2


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
        found = f"nothing; {subject.runtime} will read boundaries {ids_text(guess)}"
    elif subject.target is not None:
        found = f"nothing, and a target of {subject.target.num_layers} layers is too shallow for the default"
    else:
        found = "nothing; the runtime will read 2, N/2 and N-3"
    yield Found(f"config.json: {IDS}", "the ids the head was trained on", found)


@rule(
    "AUX_LAYERS_UNREAD",
    "warning",
    "layer ids stand under a key that no server reads",
    story="Some trainers have a key of their own for the layers. Both servers pass over it and take 2, N/2 and N-3; "
    "a head that was trained on other layers then meets states it has never seen, and nothing is logged.",
    fix="write the boundary ids as `eagle_aux_hidden_state_layer_ids`; `--fix` does where they are certain",
    source="Tencent/AngelSlim 0.5.0 target_model_wrapper.py:578-627; vLLM 0.33.0 eagle3_utils.py:119",
)
def aux_layers_unread(subject: Subject) -> Iterator[Found]:
    meant = subject.declared_aux
    if meant is None or top_ids(subject) is not None or nested_ids(subject) is not None or not subject.own_ids_key:
        return
    repair = Repair(set={(IDS,): list(meant), ("eagle_config", IDS): [i - 1 for i in meant]}) if min(meant) else None
    yield Found(
        f"config.json: {subject.own_ids_key}",
        f"`{IDS}` {ids_text(meant)}",
        f"only the trainer's own key; {subject.runtime} will read {_read(subject)}",
        level="error" if _is_misread(subject, meant) else None,
        repair=repair,
    )


@rule(
    "AUX_LAYERS_MISREAD",
    "error",
    "the server will read other layers than the head means",
    story="Ids are counted in two ways: as boundaries (the stream after so many layers) or as outputs of layers from "
    "0. This head's ids mean one thing to the trainer that wrote them and another to the server.",
    fix="`specctl convert` writes them in both spellings; name the layers with `--aux-layers`",
    source="vllm-project/vllm#43671; sgl-project/sglang#25454; nvidia/gpt-oss-120b-Eagle3-v3",
)
def aux_layers_misread(subject: Subject) -> Iterator[Found]:
    meant, read = subject.declared_aux, subject.effective_aux
    is_nested = nested_ids(subject) is not None and top_ids(subject) is None
    if meant is None or read is None or not is_nested or subject.runtime != "sglang":
        return  # other mix-ups have rules of their own
    if tuple(sorted(meant)) != read:
        yield Found(f"config.json: eagle_config.{IDS}", f"boundaries {ids_text(meant)}", f"boundaries {ids_text(read)}")


@rule(
    "AUX_LAYERS_OUTPUTS",
    "warning",
    "layer ids look like outputs where boundaries are read",
    story="At the top of config.json an id is a boundary: the stream after so many layers. These are the usual three "
    "less one, as trainers count that number the outputs of layers from 0. If they were copied so, every state is one "
    "layer too early.",
    fix="check how the trainer counts; boundaries are its outputs plus one",
    source="lightseekorg/TorchSpec#87; NVIDIA-NeMo/Automodel vllm_runner.py:236-262",
    needs=("target",),
)
def aux_layers_outputs(subject: Subject) -> Iterator[Found]:
    top, usual = top_ids(subject), subject.default_aux
    if top is not None and usual is not None and nested_ids(subject) is None and top == [i - 1 for i in usual]:
        yield Found(f"config.json: {IDS}", f"{ids_text(usual)}, or other layers on purpose", ids_text(top))


@rule(
    "AUX_LAYERS_NESTED",
    "warning",
    "layer ids stand where vLLM reads them wrongly or not",
    story="In `eagle_config` the ids mean the output of layer i, counted from 0, as SGLang and most trainers count. "
    "vLLM has two model runners: the newer one (V2) does not look there and takes its default; the older (V1, which "
    "runs parallel drafting and machines without Triton) takes the numbers as boundaries, one layer too early.",
    fix="write boundary ids (output of layer i is i + 1) at the top of config.json too",
    source="vLLM 0.33.0 eagle3_utils.py:142-147, gpu_model_runner.py:5218-5219",
    needs=("vllm",),
)
def aux_layers_nested(subject: Subject) -> Iterator[Found]:
    nested = nested_ids(subject)
    if nested is None or top_ids(subject) is not None:
        return
    meant = subject.declared_aux
    either = [meant] if meant else [tuple(nested), tuple(i + 1 for i in nested)]
    level: Level = "error" if all(_is_misread(subject, ids) for ids in either) else "warning"
    yield Found(
        f"config.json: eagle_config.{IDS}",
        f"`{IDS}` at the top" + (f", {ids_text(meant)}" if meant else ""),
        f"only the nested {ids_text(nested)}; vLLM will read {_read(subject)}",
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
    top = top_ids(subject)
    if top is None or nested_ids(subject) is not None or subject.is_speculators or min(top) < 1:
        return
    same = subject.default_aux == tuple(top)
    repair = Repair(set={("eagle_config", IDS): [i - 1 for i in top]})
    found = "only the ids at the top" + (
        f"; SGLang will read {ids_text(subject.default_aux)}" if subject.default_aux else ""
    )
    yield Found(
        f"config.json: eagle_config.{IDS}",
        ids_text([i - 1 for i in top]),
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
    top, nested = top_ids(subject), nested_ids(subject)
    if top is not None and nested is not None and sorted(top) != sorted(i + 1 for i in nested):
        yield Found(
            f"config.json: eagle_config.{IDS}",
            f"{ids_text([i - 1 for i in top])}, the top list less one",
            ids_text(nested),
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
    ids = top_ids(subject) or nested_ids(subject)
    if ids is None or len(set(ids)) != len(ids) or ids == sorted(ids):
        return
    yield Found(where_ids(subject), ids_text(sorted(ids)), ids_text(ids), repair=_sorted(subject, ids))


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
    ids = top_ids(subject) or nested_ids(subject)
    if ids is not None and len(set(ids)) != len(ids):
        yield Found(where_ids(subject), "each id once", ids_text(ids))


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
    top, nested = top_ids(subject), nested_ids(subject)
    declared = list(subject.declared_aux) if subject.declared_aux is not None else None
    ids = top if top is not None else declared or ([i + 1 for i in nested] if nested is not None else [])
    last = subject.target.num_layers if subject.target is not None else None
    bad = [i for i in ids if i < 0 or (last is not None and i > last)]
    if bad:
        expected = f"boundaries from 0 to {last if last is not None else 'N'}"
        yield Found(where_ids(subject), expected, f"boundary {bad[0]} in {ids_text(ids)}")


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
    top, nested = top_ids(subject), nested_ids(subject)
    ids = [i + 1 for i in nested] if nested is not None else top or []
    last = subject.target.num_layers if subject.target is not None else None
    for i in sorted(set(ids) & {0, *([last] if last is not None else [])}):
        yield Found(where_ids(subject), "boundaries above 0 and below the target's last", f"boundary {i}")


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


def _is_said(subject: Subject) -> bool:
    eagle = subject.raw.get("eagle_config")
    other = eagle.get("layer_ids") if isinstance(eagle, dict) else None
    return bool(top_ids(subject) or nested_ids(subject) or other or subject.misfits or subject.own_ids_key)


def _is_misread(subject: Subject, meant: Sequence[int]) -> bool:
    """Whether the runtime reads other boundaries than `meant`, whatever the target."""
    if subject.effective_aux is not None:
        return tuple(sorted(meant)) != subject.effective_aux
    # The default is 2, N/2 and N-3: three ids, the first of them 2.
    return len(meant) != DEFAULT_AUX_COUNT or min(meant) != FIRST_DEFAULT


def _read(subject: Subject) -> str:
    """What the runtime takes where it is told nothing."""
    ids = subject.effective_aux
    return f"boundaries {ids_text(ids)}" if ids is not None else "2, N/2 and N-3"


def _fused_vectors_fit(subject: Subject, count: int) -> bool:
    """Whether the vectors that move with fc's blocks are as long as fc is wide."""
    width = count * subject.head.target_hidden_size if subject.head is not None else 0
    vectors = [subject.tensors.get(name) for name in ("input_norm.weight", "mask_hidden")]
    return all(entry is None or math.prod(entry.shape) == width for entry in vectors)


def _sorted(subject: Subject, ids: list[int]) -> Repair | None:
    head = subject.head
    if head is None or not fc_fits(subject, len(ids)) or not _fused_vectors_fit(subject, len(ids)):
        return None
    changes = states_in_order(subject.tensors, ids, head.target_hidden_size)
    replace = {subject.names.get(name, name): source for name, source in changes.items()}
    lists = {(IDS,): top_ids(subject), ("eagle_config", IDS): nested_ids(subject)}
    return Repair(set={path: sorted(values) for path, values in lists.items() if values}, replace=replace)


RULES = rules_in(globals())

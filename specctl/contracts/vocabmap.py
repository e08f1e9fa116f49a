"""Rules on `d2t`, which says by offsets what target token each draft token is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from specctl.contracts._vocabmap import counting, int64_table, is_absolute, is_unfilled, map_from_mask, map_targets
from specctl.files.subject import Subject
from specctl.files.tensors import FLOATS
from specctl.records.contract import Found, Repair, rule, rules_in

if TYPE_CHECKING:
    pass


MIN_TELLING = 8
"""Entries below which a map tells nothing by its shape."""


@rule(
    "D2T_MISSING",
    "error",
    "a reduced vocabulary without its map",
    story="A draft over 32,000 of 128,000 tokens numbers them 0 to 31,999; `d2t` says which target token each is. "
    "Without it vLLM starts from zeros and reads draft id i as target id i. Training metrics stay fine, almost no "
    "token is accepted. Some trainers keep the map in a file beside the weights (eagle_meta.pt).",
    fix="put `d2t` (int64, target id minus draft id) into the weights",
    source="vLLM 0.33.0 models/llama_eagle3.py:385-395; NVIDIA-NeMo/Automodel#2447",
)
def d2t_missing(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or not head.is_reduced or "d2t" in subject.tensors or not subject.tensors:
        return
    beside = [name for name in subject.checkpoint.side_files if name.endswith((".pt", ".npy"))]
    found = "no such tensor" + (f"; `{beside[0]}` lies beside the weights and may hold it" if beside else "")
    yield Found("the weights", f"`d2t` [{head.draft_vocab_size}], int64 offsets", found, repair=map_from_mask(subject))


@rule(
    "D2T_UNNEEDED",
    "error",
    "a full vocabulary with a map",
    story="Where the draft's vocabulary is the target's, vLLM makes no place for `d2t` and stops at it as an unknown "
    "name. Older releases took a map of zeros. SpecForge and its relatives always save one.",
    fix="drop `d2t` and `t2d`",
    source="vLLM 0.30.0 models/llama_eagle3.py:339-346",
    needs=("vllm",),
    since="vLLM 0.30.0",
)
def d2t_unneeded(subject: Subject) -> Iterator[Found]:
    head = subject.head
    if head is None or head.draft_vocab_size != head.vocab_size or "d2t" not in subject.tensors:
        return
    if subject.version < (0, 30) and subject.d2t is not None and not subject.d2t.any():
        return
    drop = tuple(subject.names[name] for name in ("d2t", "t2d") if name in subject.names)
    is_identity = subject.d2t is not None and not subject.d2t.any()
    yield Found(
        subject.place("d2t"),
        f"no `d2t`, as draft_vocab_size is vocab_size, {head.vocab_size}",
        "a map that changes nothing" if is_identity else "a map that reorders the vocabulary",
        repair=Repair(drop=drop) if is_identity else None,
    )


@rule(
    "D2T_LENGTH",
    "error",
    "d2t is not as long as the draft's vocabulary",
    story="Each draft id needs one entry. A map of another vocabulary size is a left-over of an earlier run.",
    fix="use the map that was made together with this head",
    source="vllm-project/speculators#1081; vLLM 0.33.0 models/llama_eagle3.py:385-395",
)
def d2t_length(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("d2t")
    if head is not None and entry is not None and entry.shape != (head.draft_vocab_size,):
        yield Found(subject.place("d2t"), f"[{head.draft_vocab_size}]", f"{list(entry.shape)}")


@rule(
    "D2T_DTYPE",
    "error",
    "d2t is not stored as int64",
    story="Casting a whole checkpoint to bfloat16 casts the map too, and bfloat16 has no whole numbers above 256 but "
    "every second, fourth, eighth. The map still has the right shape and points at wrong tokens. int32 holds the "
    "numbers; some readers refuse it.",
    fix="save the map as int64; where `t2d` is whole, `--fix` makes it again",
    source="vLLM 0.33.0 models/llama_eagle3.py:345; trainers' save in one dtype",
)
def d2t_dtype(subject: Subject) -> Iterator[Found]:
    entry = subject.tensors.get("d2t")
    if entry is None or entry.dtype == "I64":
        return
    if entry.dtype == "I32" and subject.d2t is not None:
        widened = Repair(replace={subject.names["d2t"]: int64_table(subject.d2t)})
        yield Found(subject.place("d2t"), "int64", "int32", level="warning", repair=widened)
        return
    repair = map_from_mask(subject, subject.table("d2t")) if entry.dtype in FLOATS else None
    yield Found(subject.place("d2t"), "I64, int64 offsets", entry.dtype, repair=repair)


@rule(
    "D2T_RANGE",
    "error",
    "d2t points outside the target's vocabulary",
    story="Draft id i means target id i + d2t[i]. A table of absolute ids, or one of another target, runs past the "
    "end: vLLM then writes logits out of bounds on the device, or crashes there.",
    fix="store offsets: target id minus draft id",
    source="vLLM 0.33.0 models/llama_eagle3.py:385-395; sglang 0.5.23 models/llama_eagle3.py:350",
)
def d2t_range(subject: Subject) -> Iterator[Found]:
    targets = map_targets(subject)
    if targets is None or subject.head is None or is_absolute(subject):
        return
    bad = ((targets < 0) | (targets >= subject.head.vocab_size)).nonzero()[0]
    if len(bad):
        i = int(bad[0])
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        found = f"draft id {i} means {int(targets[i])}{more}"
        yield Found(subject.place("d2t"), f"target ids from 0 to {subject.head.vocab_size - 1}", found)


@rule(
    "D2T_ABSOLUTE",
    "error",
    "d2t holds target ids instead of offsets",
    story="Every runtime adds the draft id to the entry. A table of plain target ids has the right shape and dtype "
    "and is accepted silently as long as no sum runs past the vocabulary; every id above the first is wrong.",
    fix="subtract the draft id from each entry; `--fix` does",
    source="vLLM 0.33.0 models/llama_eagle3.py:385-395; sgl-project/SpecForge data/preprocessing.py:763",
)
def d2t_absolute(subject: Subject) -> Iterator[Found]:
    if is_absolute(subject) and subject.d2t is not None:
        offsets = subject.d2t - counting(subject.d2t)
        repair = Repair(replace={subject.names["d2t"]: int64_table(offsets)})
        yield Found(subject.place("d2t"), "target id minus draft id", "the target ids themselves", repair=repair)


@rule(
    "D2T_SUSPECT",
    "warning",
    "d2t looks like target ids instead of offsets",
    story="Offsets of a map in rising order never fall, and stand still wherever two neighbours of the vocabulary are "
    "both drafted, which happens all the time. A table that rises at every step, or has no number twice, looks like "
    "target ids. Nothing here proves it: without `t2d` both readings are in range.",
    fix="compare a few entries with the trainer's vocabulary; offsets are target id minus draft id",
    source="vLLM 0.33.0 models/llama_eagle3.py:385-395",
)
def d2t_suspect(subject: Subject) -> Iterator[Found]:
    values, mask = subject.d2t, subject.t2d
    if map_targets(subject) is None or values is None or mask is not None or is_absolute(subject):
        return
    if len(values) >= MIN_TELLING and len(set(values.tolist())) == len(values) and int(values.min()) >= 0:
        yield Found(subject.place("d2t"), "offsets, most of them equal to a neighbour's", "no number twice")


@rule(
    "D2T_DUPLICATE",
    "error",
    "two draft ids mean the same target id",
    story="Two rows of the head then compete for one token, and the token that one of them was trained on cannot be "
    "proposed at all.",
    fix="make the map again from the vocabulary the head was trained on",
    source="vLLM 0.33.0 models/llama_eagle3.py:385-395",
)
def d2t_duplicate(subject: Subject) -> Iterator[Found]:
    targets = map_targets(subject)
    if targets is None or is_absolute(subject) or is_unfilled(subject):
        return
    order = targets.argsort(kind="stable")
    same = (targets[order][1:] == targets[order][:-1]).nonzero()[0]
    if len(same):
        first, second = sorted((int(order[same[0]]), int(order[same[0] + 1])))
        found = f"draft ids {first} and {second} both mean {int(targets[first])}"
        yield Found(subject.place("d2t"), "each target id at most once", found)


@rule(
    "D2T_ZERO",
    "error",
    "d2t is all zero",
    story="Zeros are what a map looks like before it is filled: draft id i means target id i. That is right only "
    "for a draft over the first tokens of the vocabulary, which nobody trains; `t2d` would say so.",
    fix="make the map from the vocabulary the head was trained on; `--fix` takes it from `t2d` if that is whole",
    source="SafeAILab/EAGLE#222",
)
def d2t_zero(subject: Subject) -> Iterator[Found]:
    if is_unfilled(subject):
        yield Found(subject.place("d2t"), "the head's own map", "zeros only", repair=map_from_mask(subject))


@rule(
    "D2T_UNSORTED",
    "note",
    "the draft's vocabulary is not in rising order",
    story="Serving works in any order. EAGLE, SpecForge, speculators and AngelSlim train through the mask `t2d`, "
    "which is in rising order: warm-starting from this head there pairs each row with another token.",
    fix="`specctl convert` sorts the rows together with the map where a layout needs it",
    source="NVIDIA-NeMo/Automodel datasets/llm/eagle3.py:249-375; NVIDIA/Model-Optimizer",
)
def d2t_unsorted(subject: Subject) -> Iterator[Found]:
    targets = map_targets(subject)
    if targets is None or is_absolute(subject) or len(targets) < 2:
        return
    falls = (targets[1:] < targets[:-1]).nonzero()[0]
    if len(falls):
        i = int(falls[0])
        found = f"draft id {i} means {int(targets[i])}, {i + 1} means {int(targets[i + 1])}"
        yield Found(subject.place("d2t"), "rising target ids", found)


RULES = rules_in(globals())

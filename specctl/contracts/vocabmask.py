"""Rules on `t2d`, which marks the target tokens that the draft can propose."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.contracts._vocabmap import is_absolute, is_unfilled, map_targets
from specctl.files.subject import Subject
from specctl.files.tensors import Table
from specctl.records.contract import Found, Repair, rule, rules_in
from specctl.records.head import MAX_VOCABULARY


@rule(
    "T2D_DTYPE",
    "warning",
    "t2d is not stored as bool",
    story="vLLM and SGLang skip `t2d`. Trainers index with it, and an integer index of zeros and ones picks tokens "
    "0 and 1 over and over instead of masking.",
    fix="save it as bool; `--fix` does",
    source="sgl-project/SpecForge, speculators 0.9.0: `logits[..., t2d]`",
)
def t2d_dtype(subject: Subject) -> Iterator[Found]:
    entry = subject.tensors.get("t2d")
    if entry is None or entry.dtype == "BOOL":
        return
    mask = subject.t2d
    repair = None
    if mask is not None:
        table = Table("BOOL", entry.shape, mask.astype("uint8").tobytes())
        repair = Repair(replace={subject.names["t2d"]: table})
    yield Found(subject.place("t2d"), "BOOL", entry.dtype, repair=repair)


@rule(
    "T2D_LENGTH",
    "error",
    "t2d is not as long as the target's vocabulary",
    story="`t2d` marks for each target token whether the draft can propose it. Another length belongs to another "
    "target or to a padded vocabulary.",
    fix="make it from `d2t`; `--fix` does",
    source="speculators 0.9.0 vocab_mapping.py:74-106",
)
def t2d_length(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("t2d")
    if head is not None and entry is not None and entry.shape != (head.vocab_size,):
        expected = f"[{head.vocab_size}]"
        yield Found(subject.place("t2d"), expected, f"{list(entry.shape)}", repair=_mask_repair(subject))


@rule(
    "T2D_DISAGREES",
    "error",
    "t2d and d2t name different tokens",
    story="The two tables say the same thing from both ends. Where they differ, one is of another run: the head was "
    "trained by one and is served by the other.",
    fix="find out which of the two the head was trained with",
    source="sgl-project/SpecForge data/preprocessing.py:763; vllm-project/speculators#1081",
)
def t2d_disagrees(subject: Subject) -> Iterator[Found]:
    head, mask, targets = subject.head, subject.t2d, map_targets(subject)
    if head is None or mask is None or targets is None or mask.shape != (head.vocab_size,):
        return
    if ((targets < 0) | (targets >= head.vocab_size)).any() or is_absolute(subject) or is_unfilled(subject):
        return
    count = int(mask.sum())
    if count != head.draft_vocab_size:
        yield Found(subject.place("t2d"), f"{head.draft_vocab_size} tokens marked", str(count))
        return
    unmarked = (~mask[targets]).nonzero()[0]
    if len(unmarked):
        i = int(unmarked[0])
        found = f"draft id {i} means {int(targets[i])}, which `t2d` does not mark"
        yield Found(subject.place("t2d"), "the same tokens as `d2t`", found)


def _mask_repair(subject: Subject) -> Repair | None:
    head, targets = subject.head, map_targets(subject)
    if head is None or head.vocab_size > MAX_VOCABULARY or targets is None:
        return None
    if ((targets < 0) | (targets >= head.vocab_size)).any():
        return None
    import numpy as np

    mask = np.zeros(head.vocab_size, np.uint8)
    mask[targets] = 1
    return Repair(replace={subject.names["t2d"]: Table("BOOL", (head.vocab_size,), mask.tobytes())})


RULES = rules_in(globals())

"""Rules on the numbers in the tensors, read in pieces: `--deep`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from specctl.files.subject import Subject
from specctl.files.tensors import FLOATS, TensorEntry, float_chunks
from specctl.records.contract import Found, Level, rule, rules_in

ROWS: Final = 4096
PAIR_BYTES: Final = 8 << 20
"""Of each of two tables that are compared, at once; well below what `float_chunks` itself would cut."""
LARGEST: Final = {"float16": 65504.0}
SAME_SHARE: Final = 0.999
"""Cosine above which two embeddings are one table after a cast."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What one pass over a tensor tells. `constant_rows` counts rows whose numbers are all equal."""

    not_finite: int
    first_bad: tuple[int, ...]
    max_abs: float
    is_constant: bool
    first: float
    constant_rows: int
    first_constant_row: int
    rows: int


@rule(
    "VALUES_NOT_FINITE",
    "error",
    "a tensor holds NaN or infinity",
    story="One number that is not finite spreads to every logit. The runtime then drafts token 0, or nothing, and "
    "rejects all of it: the server is slower than without a draft and logs nothing.",
    fix="take an earlier checkpoint; find the step at which the loss became NaN",
    source="vllm-project/speculators#615",
    needs=("deep",),
)
def values_not_finite(subject: Subject) -> Iterator[Found]:
    for name, entry in _floats(subject):
        stats = statistics(entry)
        if stats.not_finite:
            place = f"at {list(stats.first_bad)}"
            yield Found(subject.place(name), "finite numbers", f"{stats.not_finite} that are not, the first {place}")


@rule(
    "VALUES_CONSTANT",
    "error",
    "a weight is all one number",
    story="A matrix of zeros or of one number was never trained, or was made by an export that did not find the "
    "real one. Its layer tells the next nothing.",
    fix="export the head again from the trainer's own state",
    source="sgl-project/sglang#27908; lightseekorg/TorchSpec#38",
    needs=("deep",),
)
def values_constant(subject: Subject) -> Iterator[Found]:
    for name, entry in _floats(subject):
        stats = statistics(entry)
        is_matrix = len(entry.shape) == 2 and stats.rows > 1
        is_dead = stats.is_constant and (is_matrix or stats.first == 0) and name != "mask_hidden"
        if is_dead and not stats.not_finite and not name.endswith(".bias"):
            yield Found(subject.place(name), "trained numbers", f"{stats.first:g} everywhere")


@rule(
    "FC_BLOCK_EMPTY",
    "error",
    "fc ignores one of the states it is fed",
    story="A block of fc's columns that is all zero was never trained: the trainer fed zeros there, or an export put "
    "the columns together wrongly. The head works without one of its layers.",
    fix="check which layers the trainer captured; export the head again",
    source="SafeAILab/EAGLE#239",
    needs=("deep",),
)
def fc_block_empty(subject: Subject) -> Iterator[Found]:
    head, entry = subject.head, subject.tensors.get("fc.weight")
    if head is None or entry is None or entry.dtype not in FLOATS or entry.shape != (head.hidden_size, head.fc_width):
        return
    if not head.use_aux or statistics(entry).is_constant:
        return
    used = _used_blocks(entry, head.num_aux)
    for block in (i for i, is_used in enumerate(used) if not is_used):
        found = f"columns {block * head.target_hidden_size} to {(block + 1) * head.target_hidden_size - 1} all zero"
        yield Found(subject.place("fc.weight"), f"numbers for each of {head.num_aux} states", found)


@rule(
    "ROWS_EQUAL",
    "error",
    "every row of a table is the same",
    story="A head whose rows are equal gives every token the same logit, and an embedding of equal rows tells tokens "
    "apart in nothing. It is what a table looks like that was broadcast from one row.",
    fix="export the head again from the trainer's own state",
    source="lightseekorg/TorchSpec#38",
    needs=("deep",),
)
def rows_equal(subject: Subject) -> Iterator[Found]:
    for name in ("lm_head.weight", "embed_tokens.weight"):
        entry = subject.tensors.get(name)
        if entry is None or entry.dtype not in FLOATS or len(entry.shape) != 2 or entry.shape[0] < 2:
            continue
        if not statistics(entry).is_constant and not statistics(entry).not_finite and _has_equal_rows(entry):
            yield Found(subject.place(name), "rows of their own", f"{entry.shape[0]} times the same row")


@rule(
    "ROWS_UNTRAINED",
    "warning",
    "rows of a table are empty",
    story="Rows of the head or of the embedding that are all zero (or one number) belong to tokens that training "
    "never touched, or to padding. Their tokens are never drafted, or drafted at random.",
    fix="none needed for padding; otherwise make the vocabulary map from the data the head was trained on",
    source="verl-project/verl-SpeCo#66",
    needs=("deep",),
)
def rows_untrained(subject: Subject) -> Iterator[Found]:
    for name in ("lm_head.weight", "embed_tokens.weight"):
        entry = subject.tensors.get(name)
        if entry is None or entry.dtype not in FLOATS or len(entry.shape) != 2 or entry.shape[1] < 2:
            continue
        stats = statistics(entry)
        if stats.constant_rows and not stats.is_constant and not stats.not_finite:
            found = f"{stats.constant_rows} of one number only, the first row {stats.first_constant_row}"
            yield Found(subject.place(name), "numbers in every row", found)


@rule(
    "EMBED_DIFFERS",
    "warning",
    "the draft's embedding is not the target's",
    story="A draft that trained its embedding has its own, which is right. An export that rebuilt the model and did "
    "not find the table leaves random numbers there, and vLLM keeps the draft's table whenever there is one. SGLang "
    "replaces it by the target's where the widths agree, so a trained one is lost.",
    fix="check that the trainer trained the embedding; otherwise take the target's",
    source="lightseekorg/TorchSpec#38; vLLM 0.33.0 eagle/utils.py:45-77; sglang 0.5.23 models/llama.py:910-918",
    needs=("deep", "target"),
)
def embed_differs(subject: Subject) -> Iterator[Found]:
    own, theirs = subject.tensors.get("embed_tokens.weight"), subject.embedding
    if own is None or theirs is None or own.shape != theirs.shape or {own.dtype, theirs.dtype} - FLOATS:
        return
    cosine, gap = _likeness(own, theirs)
    if gap == 0 or (own.dtype != theirs.dtype and cosine > SAME_SHARE):
        return
    found = f"cosine {cosine:.4f}, largest difference {gap:.3g}"
    head = subject.head
    is_lost = subject.runtime == "sglang" and head is not None and head.hidden_size == head.target_hidden_size
    expected = (
        "the target's table, which SGLang puts in its place" if is_lost else "the target's table, or a trained one"
    )
    level: Level | None = "error" if is_lost else None
    yield Found(subject.place("embed_tokens.weight"), expected, found, level=level)


@rule(
    "DTYPE_OVERFLOWS",
    "error",
    "a number does not fit the dtype it is served in",
    story="vLLM casts the draft to the target's dtype. float16 ends at 65504, and a larger weight becomes infinity "
    "there without a message.",
    fix="serve the pair in bfloat16",
    source="vLLM 0.33.0 config/speculative.py:1406-1430",
    needs=("deep", "target"),
)
def dtype_overflows(subject: Subject) -> Iterator[Found]:
    limit = LARGEST.get((subject.target.dtype or "") if subject.target is not None else "")
    for name, entry in _floats(subject) if limit is not None else ():
        stats = statistics(entry)
        if limit is not None and not stats.not_finite and stats.max_abs > limit:
            yield Found(subject.place(name), f"at most {limit:g}, for the target's float16", f"{stats.max_abs:g}")


@rule(
    "DTYPE_LOSS",
    "note",
    "serving rounds the weights",
    story="The runtime casts the draft to the target's dtype. Weights in float32 keep 24 bits, bfloat16 keeps 8: the "
    "draft that is served is a rounded one, most often without a change in acceptance.",
    fix="none needed; save in the target's dtype to halve the file",
    source="vLLM 0.33.0 config/speculative.py:1406-1430",
    needs=("deep", "target"),
)
def dtype_loss(subject: Subject) -> Iterator[Found]:
    kinds = {entry.dtype for _, entry in _floats(subject)}
    target = subject.target.dtype if subject.target is not None else None
    if "F32" in kinds and target in ("bfloat16", "float16") and not any(dtype_overflows.check(subject)):
        yield Found("the weights", f"{target}, as the target", "float32")


@lru_cache(maxsize=4096)
def statistics(entry: TensorEntry) -> Statistics:
    """One pass over a float tensor in bounded memory."""
    import numpy as np

    not_finite, max_abs, constant_rows, rows = 0, 0.0, 0, 0
    first_bad: tuple[int, ...] = ()
    first_constant, first, low, high = -1, float("nan"), np.inf, -np.inf
    for row, values in float_chunks(entry, ROWS):
        flat = values.reshape(len(values), -1)
        if rows == 0 and flat.size:
            first = float(flat[0, 0])
        finite = np.isfinite(flat)
        if not finite.all():
            bad = np.argwhere(~finite)
            not_finite += len(bad)
            first_bad = first_bad or (row + int(bad[0][0]), *map(int, bad[0][1:]))[: max(1, len(entry.shape))]
            flat = np.where(finite, flat, 0)
        if flat.size:
            least, most = flat.min(axis=1), flat.max(axis=1)
            same = least == most
            low, high = min(low, float(least.min())), max(high, float(most.max()))
            if same.any() and first_constant < 0:
                first_constant = row + int(same.argmax())
            constant_rows += int(same.sum())
        rows += len(flat)
    max_abs = max(abs(low), abs(high)) if rows and low <= high else 0.0
    return Statistics(not_finite, first_bad, max_abs, low == high, first, constant_rows, first_constant, rows)


def _floats(subject: Subject) -> list[tuple[str, TensorEntry]]:
    tensors = subject.tensors.items()
    return sorted((name, entry) for name, entry in tensors if entry.dtype in FLOATS and name not in ("d2t", "t2d"))


@lru_cache(maxsize=8)
def _used_blocks(entry: TensorEntry, count: int) -> tuple[bool, ...]:
    """Whether each of `count` blocks of columns has a number that is not zero."""
    import numpy as np

    used = np.zeros(count, bool)
    for _, values in float_chunks(entry, ROWS):
        used |= (values.reshape(len(values), count, -1) != 0).any(axis=(0, 2))
    return tuple(map(bool, used))


@lru_cache(maxsize=8)
def _has_equal_rows(entry: TensorEntry) -> bool:
    first = None
    for _, values in float_chunks(entry, ROWS):
        first = values[:1].copy() if first is None else first
        if not bool((values == first).all()):
            return False
    return True


@lru_cache(maxsize=8)
def _likeness(one: TensorEntry, other: TensorEntry) -> tuple[float, float]:
    """Cosine of two tables as vectors, and their largest difference; one pass over both."""
    import numpy as np

    # float_chunks gives fewer rows of a wider dtype; both tables have to come in the same steps.
    widest = max(entry.nbytes // max(1, entry.shape[0]) for entry in (one, other))
    rows = max(1, min(ROWS, PAIR_BYTES // max(1, widest)))
    dot = left = right = gap = 0.0
    for (_, a), (_, b) in zip(float_chunks(one, rows), float_chunks(other, rows), strict=True):
        x, y = np.nan_to_num(a.astype(np.float64)), np.nan_to_num(b.astype(np.float64))
        dot, left, right = dot + float((x * y).sum()), left + float((x * x).sum()), right + float((y * y).sum())
        gap = max(gap, float(np.abs(x - y).max(initial=0.0)))
    return (dot / (left * right) ** 0.5 if left and right else 0.0), gap


RULES = rules_in(globals())

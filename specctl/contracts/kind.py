"""Rules on what the folder is: a head of this kind, or something else that lies in the same place."""

from collections.abc import Iterator
from typing import Final

from specctl.files.subject import Subject
from specctl.records.contract import Found, rule, rules_in

MARKS: Final = ("layers.0.hidden_norm.weight", "fc.weight", "d2t", "mask_hidden")
"""Tensors of which every EAGLE-3 and P-EAGLE head has at least one."""


@rule(
    "KIND_OTHER",
    "error",
    "this is no EAGLE-3 or P-EAGLE head",
    story="The folder holds a model of another kind: the target itself, an EAGLE-1 or EAGLE-2 head (its fc takes two "
    "widths, it has no `hidden_norm`), or a draft of another method. Other rules would list every difference, so only "
    "this one speaks.",
    fix="give the folder that the trainer of the EAGLE-3 or P-EAGLE head wrote",
    source="arXiv 2401.15077, arXiv 2503.01840; vLLM 0.33.0 models/llama_eagle3.py",
)
def kind_other(subject: Subject) -> Iterator[Found]:
    found = _other(subject)
    if found is not None:
        yield Found("the weights", "`fc.weight` over the fused states and a layer with `hidden_norm`", found)


def _other(subject: Subject) -> str | None:
    names = subject.tensors
    if not names or (subject.is_unread and "fc.weight" not in names):
        return None
    fc = names.get("fc.weight")
    is_first = fc is not None and len(fc.shape) == 2 and fc.shape[1] == 2 * fc.shape[0] and MARKS[0] not in names
    if is_first and "d2t" not in names:
        return "an EAGLE-1 or EAGLE-2 head: fc takes an embedding and one state"
    if any(mark in names for mark in MARKS):
        return None
    layers = len(subject.layers)
    return f"a whole language model of {layers} layers" if layers and "embed_tokens.weight" in names else "none of them"


RULES = rules_in(globals())

"""Small heads, packed batches and teachers for the tests of drafts, all from a seed."""

from dataclasses import replace
from typing import Any

import torch

from specctl.core.losses import Teacher, make_teacher
from specctl.core.modules import DraftModel
from specctl.records.draft import DraftBatch
from specctl.records.head import HeadConfig

VOCAB, RESERVED = 24, 23
HEAD = HeadConfig(
    block="llama",
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=VOCAB,
    draft_vocab_size=10,
    target_hidden_size=6,
    num_aux=2,
    aux_ids=(1, 2),
    rms_norm_eps=1e-5,
    hidden_act="silu",
    rope={"rope_type": "default", "rope_theta": 100.0},
    max_position_embeddings=64,
)
PARALLEL = replace(HEAD, parallel_drafting=True, mask_token_id=RESERVED)


def a_model(head: HeadConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> DraftModel:
    """A head with every weight random and none of them special, its vocabulary spread over the target's."""
    draw = torch.Generator().manual_seed(seed)
    model = DraftModel(head, generator=draw)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) * 0.5 + (1.0 if "norm" in name else 0.0))
    if head.is_reduced:
        ids = torch.randperm(head.vocab_size, generator=draw)[: head.draft_vocab_size].sort().values
        model.set_vocabulary(ids)
    return model.to(dtype)


def a_teacher(model: DraftModel, *, seed: int = 1) -> Teacher:
    """A random head of the target, peaked enough to have opinions."""
    head, dtype = model.head, model.norm.weight.dtype
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(head.vocab_size, head.target_hidden_size, generator=draw).to(dtype)
    return make_teacher(weight, model.vocabulary())


def a_batch(
    head: HeadConfig,
    masks: tuple[tuple[int, ...], ...],
    *,
    padding: int = 0,
    seed: int = 2,
    dtype: torch.dtype = torch.float64,
) -> DraftBatch:
    """Documents with these loss masks packed into one row, then `padding` tokens of NaN states."""
    draw = torch.Generator().manual_seed(seed)
    bounds = [0]
    for mask in masks:
        bounds.append(bounds[-1] + len(mask))
    length = bounds[-1] + padding
    aux = torch.randn(length, head.fc_width, generator=draw).to(dtype)
    final = torch.randn(length, head.target_hidden_size, generator=draw).to(dtype)
    aux[bounds[-1] :], final[bounds[-1] :] = torch.nan, torch.nan
    flat = torch.tensor([bit for mask in masks for bit in mask] + [1] * padding, dtype=torch.uint8)
    return DraftBatch(torch.randint(0, VOCAB - 1, (length,), generator=draw), tuple(bounds), flat, aux, final)


def documents(batch: DraftBatch) -> list[dict[str, Any]]:
    """The batch as the loop reference takes it, in float64."""
    return [
        {
            "ids": batch.input_ids[a:b].tolist(),
            "mask": batch.loss_mask[a:b].tolist(),
            "aux": batch.aux[a:b].double(),
            "final": batch.final[a:b].double(),
        }
        for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)
    ]


def loop_parts(model: DraftModel, teacher: Teacher) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights by canonical name, float64 with gradients, and the teacher, as the loop reference takes them."""
    weights = {n: w.detach().double().clone().requires_grad_() for n, w in model.named_parameters()}
    weight = teacher.whole_VD
    vocabulary = model.vocabulary()
    ids = list(range(model.head.vocab_size)) if vocabulary is None else vocabulary.tolist()
    return weights, {"weight": weight.double(), "vocabulary": ids}


def assert_same_gradients(model: DraftModel, weights: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every parameter has the reference's gradient, relative to the largest entry of either."""
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        found = parameter.grad
        if expected is None or found is None:
            assert (expected is None or not expected.any()) and (found is None or not found.any()), name
            continue
        scale = max(1.0, float(expected.abs().max()))
        assert float((found.double() - expected).abs().max()) <= tolerance * scale, name

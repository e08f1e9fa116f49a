"""The head as a module: canonical names, rotary phases by value, fresh heads, teachers, one module for all."""

import inspect
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from draft_parts import HEAD, PARALLEL, a_batch, a_model, a_teacher
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from specctl import plugins
from specctl.core import losses
from specctl.core.layer import RMSNorm
from specctl.core.losses import distil, make_teacher
from specctl.core.modules import DraftCache, DraftModel
from specctl.core.rotary import Rotary
from specctl.drafts import eagle3, peagle
from specctl.errors import NotSupportedError
from specctl.records.draft import DraftSettings
from specctl.records.head import optional_shapes, required_shapes

KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "proportional": {"factor": 2.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16},
}


def roped(kind: str, **more):
    return replace(HEAD, head_dim=8, rope={"rope_type": kind, "rope_theta": 1000.0, **KINDS[kind], **more})


@pytest.mark.parametrize("block", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_hidden_layers": 3, "fc_norm": True, "attention_bias": True},
        {"norm_before_fc": True, "mlp_bias": True, "parallel_drafting": True, "mask_token_id": 1},
        {"draft_vocab_size": HEAD.vocab_size},
        {"num_aux": 1, "aux_ids": (0,)},
    ],
)
def test_state_dict_names_and_shapes_are_the_canonical_ones(block: str, more: dict) -> None:
    head = replace(HEAD, block=block, **more)
    found = {name: tuple(t.shape) for name, t in DraftModel(head).state_dict().items()}
    wanted = required_shapes(head)
    assert wanted.items() <= found.items()
    assert {k: v for k, v in found.items() if k not in wanted}.items() <= optional_shapes(head).items()


def test_a_vocabulary_map_is_offsets_and_a_mask() -> None:
    model = DraftModel(HEAD)
    ids = torch.tensor([0, 2, 3, 5, 8, 13, 14, 20, 21, 23])
    model.set_vocabulary(ids)
    assert (torch.arange(10) + model.d2t).tolist() == ids.tolist()
    assert model.t2d.nonzero()[:, 0].tolist() == ids.tolist()
    assert model.target_ids(torch.tensor([4, 0])).tolist() == [8, 0]
    assert torch.equal(model.vocabulary(), ids)


def test_phases_follow_the_values_of_positions() -> None:
    """A table cut by length made depth offsets and packing do nothing (NVIDIA-NeMo/Automodel#2377)."""
    rotary = Rotary(roped("default"))

    def cos(*positions: int) -> torch.Tensor:
        return rotary(torch.tensor(positions), torch.float32).cos_NR

    assert torch.equal(cos(5, 6, 7), cos(*range(8))[5:])
    assert not torch.equal(cos(5, 6, 7), cos(0, 1, 2))
    assert torch.equal(cos(0, 1, 0, 1), cos(0, 1).repeat(2, 1))
    assert bool(cos(10**6).isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [12, 200])
def test_every_kind_of_rope_equals_that_of_transformers(kind: str, length: int) -> None:
    head = roped(kind)
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=64, rope_parameters=dict(head.rope)
    )
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 4, length, 8, generator=draw) for _ in range(2))
    positions = torch.arange(length)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected, _ = apply_rotary_pos_emb(q, k, cos, sin)
    found = Rotary(head)(positions, torch.float32).turn(q[0].transpose(0, 1))
    assert torch.allclose(found.transpose(0, 1), expected[0], atol=1e-5)


def test_part_of_a_head_may_be_turned() -> None:
    rotary = Rotary(roped("default", partial_rotary_factor=0.5))
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    turned = rotary(torch.tensor([1, 2, 3]), torch.float32).turn(x)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.equal(turned[..., :4], x[..., :4])


def test_an_unknown_kind_of_rope_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="spiral"):
        Rotary(replace(HEAD, rope={"rope_type": "spiral", "rope_theta": 1.0}))


def test_phases_stay_exact_when_the_weights_are_cast() -> None:
    model = a_model(HEAD, dtype=torch.bfloat16)
    assert model.phases(torch.arange(3)).cos_NR.dtype == torch.float32


def test_a_norm_is_computed_in_float32() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 100
    norm = RMSNorm(64, 1e-6)
    assert torch.equal(norm(x.bfloat16()), norm(x.bfloat16().float()).bfloat16())


@pytest.mark.parametrize("module", [eagle3, peagle])
@pytest.mark.parametrize("hidden", [32, 512])
def test_a_fresh_head_starts_at_the_logarithm_of_its_vocabulary(module, hidden: int) -> None:
    head = replace(PARALLEL, hidden_size=hidden, vocab_size=600, draft_vocab_size=400)
    model = DraftModel(head, generator=torch.Generator().manual_seed(0))
    teacher = make_teacher(torch.randn(600, 6, generator=torch.Generator().manual_seed(1)) * 30, model.vocabulary())
    batch = a_batch(head, ((1,) * 40,), dtype=torch.float32)
    for loss in ("kl", "ce"):  # the teacher is all but certain, so its own entropy is small
        found = module.training_loss(
            model, batch, teacher=teacher, settings=DraftSettings(3, loss=loss), generator=torch.Generator()
        )
        assert float(found.loss.detach() / found.weight) == pytest.approx(math.log(400), rel=0.05)


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 21])
def test_chunks_change_neither_loss_nor_gradient(kind, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    model = a_model(HEAD)
    teacher = a_teacher(model)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 8, generator=draw, dtype=torch.float64, requires_grad=True)
    states = torch.randn(20, 6, generator=draw, dtype=torch.float64)
    rows, weights = torch.randint(0, 20, (50,), generator=draw), torch.rand(50, generator=draw)
    found = distil(
        hidden, model.lm_head.weight, teacher=teacher, states_UD=states, rows_M=rows, weights_M=weights, kind=kind
    )
    grads = torch.autograd.grad(found.total * 3, (hidden, model.lm_head.weight))

    log_q = (hidden @ model.lm_head.weight.T).log_softmax(-1)
    logits = states @ teacher.whole_VD.T
    p = logits[:, teacher.ids_W].softmax(-1)[rows]
    best = teacher.draft_ids(logits.argmax(-1))[rows]
    each = (p * (p.log() - log_q)).sum(-1)
    if kind == "ce":
        each = torch.where(best >= 0, -log_q.gather(1, best.clamp_min(0)[:, None])[:, 0], 0.0)
    expected = torch.autograd.grad((each * weights).sum() * 3, (hidden, model.lm_head.weight))
    assert torch.allclose(found.losses_M, each.detach(), atol=1e-12)
    assert torch.equal(found.hits_M, log_q.argmax(-1) == best)
    assert torch.equal(found.outside_M, best < 0)
    for one, other in zip(grads, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_a_draft_that_is_almost_right_still_has_an_exact_gradient_in_bfloat16() -> None:
    """p - q in bfloat16 loses 10 to 30 % of it where both are close (vllm-project/speculators#788)."""
    draw = torch.Generator().manual_seed(0)
    teacher = make_teacher(torch.randn(64, 16, generator=draw).bfloat16(), None)
    states = torch.randn(30, 16, generator=draw).bfloat16()
    hidden = (states.float() + 1e-2 * torch.randn(30, 16, generator=draw)).bfloat16().requires_grad_()
    rows, ones = torch.arange(30), torch.ones(30)
    found = distil(hidden, teacher.whole_VD, teacher=teacher, states_UD=states, rows_M=rows, weights_M=ones, kind="kl")
    (grad,) = torch.autograd.grad(found.total, hidden)
    # The reference starts from the same logits, which are products of bfloat16 and rounded to it.
    z = (hidden.detach() @ teacher.whole_VD.T).double()
    p = (states @ teacher.whole_VD.T).double().softmax(-1)
    expected = (z.softmax(-1) - p) @ teacher.whole_VD.double()
    assert float((grad.double() - expected).norm() / expected.norm()) < 0.01


def test_greedy_tokens_of_the_teacher_are_those_of_the_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 6, generator=torch.Generator().manual_seed(0))
    states = torch.randn(17, 6, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 1)
    for ids in (None, torch.arange(0, 300, 7)):
        assert torch.equal(make_teacher(weight, ids).greedy_ids(states), (states @ weight.T).argmax(-1))


def test_a_soft_cap_bounds_the_teachers_logits() -> None:
    weight = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)) * 100
    states = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    capped = make_teacher(weight, None, softcap=30.0).logits(states, weight)
    assert torch.allclose(capped, 30 * torch.tanh(states @ weight.T / 30))


@pytest.mark.parametrize("cuts", [(5,), (1, 4, 5), (2, 2, 3, 6)])
def test_decoding_in_pieces_equals_decoding_at_once(cuts: tuple[int, ...]) -> None:
    model = a_model(replace(HEAD, num_hidden_layers=2))
    draw = torch.Generator().manual_seed(0)
    ids, hidden = torch.randint(0, 20, (8,), generator=draw), torch.randn(8, 8, generator=draw, dtype=torch.float64)
    whole = DraftCache(model).run(ids, hidden)
    cache, bounds = DraftCache(model), [0, *sorted(set(cuts)), 8]
    for lower, upper in pairwise(bounds):
        cache.run(ids[lower:upper] + 1, hidden[lower:upper].flip(0))  # something that is refused
        cache.crop(lower)
        assert torch.allclose(cache.run(ids[lower:upper], hidden[lower:upper]), whole[lower:upper], atol=1e-12)


@pytest.mark.parametrize("name", plugins.names("drafts"))
def test_every_draft_satisfies_its_protocol(name: str) -> None:
    draft, wanted = plugins.load_draft(name), inspect.signature(plugins.Draft.training_loss).parameters
    assert isinstance(draft.IS_PARALLEL, bool)
    assert list(inspect.signature(draft.training_loss).parameters) == [p for p in wanted if p != "self"]


def test_the_same_seed_makes_the_same_head() -> None:
    one, other = (DraftModel(PARALLEL, generator=torch.Generator().manual_seed(4)).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)

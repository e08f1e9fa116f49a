"""EAGLE-3's training loss against a float64 loop, and the alignment that acceptance rests on."""

from dataclasses import replace

import pytest
import torch
from draft_parts import HEAD, a_batch, a_model, a_teacher, assert_same_gradients, documents, loop_parts
from loop_reference import Loop, eagle3

from specctl.core.slots import scored, slots_of
from specctl.drafts.eagle3 import training_loss
from specctl.errors import UsageError
from specctl.records.draft import DraftBatch, DraftSettings

ONE = ((0, 0, 1, 1, 1, 0, 1, 1),)
PACKED = ((1, 1, 1, 1, 1), (0, 1, 1), (1,), (1, 1), (0, 0, 0, 1, 0, 1, 1))
HEADS = {
    "llama": HEAD,
    "normed residual, output and input": replace(
        HEAD, norm_before_residual=True, norm_output=True, norm_before_fc=True
    ),
    "qwen3, two layers, fc_norm": replace(HEAD, block="qwen3", num_hidden_layers=2, fc_norm=True, attention_bias=True),
    "biases, whole vocabulary": replace(HEAD, attention_bias=True, mlp_bias=True, draft_vocab_size=HEAD.vocab_size),
    "sliding window": replace(
        HEAD, num_hidden_layers=2, sliding_window=2, layer_types=("sliding_attention", "full_attention")
    ),
}


def assert_equals_the_loop(head, masks, settings, *, padding=0, dtype=torch.float64, tolerance=1e-9):
    model = a_model(head, dtype=dtype)
    teacher = a_teacher(model)
    batch = a_batch(head, masks, padding=padding, dtype=dtype)
    found = training_loss(model, batch, teacher=teacher, settings=settings)
    found.loss.backward()
    weights, plain = loop_parts(model, teacher)
    pairs = [
        eagle3(Loop(head, weights, d, plain), settings.num_draft_tokens, settings.depth_decay, settings.loss)
        for d in documents(batch)
    ]
    loss, weight = sum(p[0] for p in pairs), sum(p[1] for p in pairs)
    loss.backward()
    loss = loss.detach()
    assert abs(float(found.weight) - weight) < 1e-9
    assert abs(float(found.loss.detach()) - float(loss)) <= tolerance * max(1.0, float(loss))
    assert_same_gradients(model, weights, tolerance)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("masks", [ONE, PACKED], ids=["one document", "packed"])
def test_loss_and_every_gradient_equal_the_loop(steps: int, masks) -> None:
    assert_equals_the_loop(HEAD, masks, DraftSettings(steps), padding=3)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_every_kind_of_head_equals_the_loop(head) -> None:
    assert_equals_the_loop(head, PACKED, DraftSettings(3, depth_decay=0.9))


def test_float32_equals_the_loop_to_rounding() -> None:
    assert_equals_the_loop(HEAD, PACKED, DraftSettings(4), dtype=torch.float32, tolerance=1e-5)


def test_cross_entropy_scores_the_greedy_token_and_skips_those_outside_the_vocabulary() -> None:
    assert_equals_the_loop(HEAD, PACKED, DraftSettings(3, loss="ce"))


def test_checkpointed_layers_change_no_number() -> None:
    assert_equals_the_loop(HEADS["qwen3, two layers, fc_norm"], PACKED, DraftSettings(3, checkpoint_layers=True))


def test_a_slot_is_scored_iff_the_mask_is_set_at_the_token_it_is_scored_on() -> None:
    """One off here trains on headers, or never on the first draft of an answer (sgl-project/SpecForge#885)."""
    batch = a_batch(HEAD, ((0, 0, 1, 1, 1),))
    found = scored(batch, slots_of(batch), 2)
    # Slot p predicts x[p+2+depth]; supervised are x[2], x[3], x[4].
    assert found.T.tolist() == [[True, True, True, False], [True, True, False, False]]


def test_no_target_lies_in_the_next_document() -> None:
    batch = a_batch(HEAD, ((1, 1, 1), (1, 1, 1)))
    slots = slots_of(batch)
    assert slots.tokens_N.tolist() == [0, 1, 3, 4]
    assert slots.places_N.tolist() == [0, 1, 0, 1]
    assert scored(batch, slots, 2).T.tolist() == [[True, False, True, False], [False] * 4]


def test_packing_and_padding_change_neither_loss_nor_gradient() -> None:
    model = a_model(HEAD)
    teacher, whole = a_teacher(model), a_batch(HEAD, PACKED, padding=5)
    settings = DraftSettings(3)
    training_loss(model, whole, teacher=teacher, settings=settings).loss.backward()
    packed = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for a, b in zip(whole.offsets, whole.offsets[1:], strict=False):
        parts = (whole.input_ids, whole.loss_mask, whole.aux, whole.final)
        ids, mask, aux, final = (x[a:b] for x in parts)
        training_loss(
            model, DraftBatch(ids, (0, b - a), mask, aux, final), teacher=teacher, settings=settings
        ).loss.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, packed[name], atol=1e-12), name


def test_one_scored_token_gives_gradients_only_where_it_should() -> None:
    model = a_model(HEAD)
    model.embed_tokens.weight.requires_grad_(False)
    batch = a_batch(HEAD, ((0, 0, 0, 1, 0),))
    training_loss(model, batch, teacher=a_teacher(model), settings=DraftSettings(1)).loss.backward()
    assert model.embed_tokens.weight.grad is None
    assert all(p.grad.any() for n, p in model.named_parameters() if n != "embed_tokens.weight")


def test_nothing_scored_is_a_loss_of_zero_and_gradients_of_zero() -> None:
    model = a_model(HEAD)
    batch = a_batch(HEAD, ((0, 0, 0, 0), (1,)))
    found = training_loss(model, batch, teacher=a_teacher(model), settings=DraftSettings(3))
    found.loss.backward()
    assert (float(found.loss.detach()), float(found.weight), found.counts.tolist()) == (0.0, 0.0, [0, 0, 0])
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_known_greedy_tokens_change_nothing() -> None:
    model = a_model(HEAD)
    teacher, batch = a_teacher(model), a_batch(HEAD, PACKED)
    known = replace(batch, greedy_ids=teacher.greedy_ids(batch.final))
    one, other = (
        training_loss(model, b, teacher=teacher, settings=DraftSettings(3, loss="ce")) for b in (batch, known)
    )
    assert torch.equal(one.loss, other.loss)
    assert one.hits.tolist() == other.hits.tolist()


def test_a_greedy_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    """Restricting the argmax to the draft vocabulary counts hits that serving never sees (SpecForge c90d72a0)."""
    model = a_model(HEAD)
    teacher, batch = a_teacher(model), a_batch(HEAD, PACKED)
    found = training_loss(model, batch, teacher=teacher, settings=DraftSettings(2))
    greedy = teacher.greedy_ids(batch.final)
    slots = slots_of(batch)
    for depth, is_scored in enumerate(scored(batch, slots, 2).T):
        targets = greedy[slots.tokens_N[is_scored] + 1 + depth]
        assert int(found.outside[depth]) == int((~model.t2d[targets]).sum())
        assert int(found.hits[depth]) <= int(found.counts[depth]) - int(found.outside[depth])
    assert int(found.outside[0]) > 0


def test_simulated_acceptance_length_joins_the_depths() -> None:
    from specctl.records.draft import LossReport

    k = torch.tensor
    found = LossReport(k(0.0), k(1.0), k([10] * 3), k([0.0] * 3), k([8, 6, 5]), k([0] * 3), k([10] * 3), k([8, 4, 2]))
    assert found.simulated_acceptance_length() == pytest.approx(2.4)


@pytest.mark.parametrize("steps", [0, -1, 1.0, True])
def test_a_number_of_steps_without_meaning_is_refused(steps) -> None:
    with pytest.raises(UsageError, match="whole number"):
        DraftSettings(steps)

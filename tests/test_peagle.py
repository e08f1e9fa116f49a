"""P-EAGLE's training loss against a float64 loop, its sampling of depths, and parity with what a server runs."""

from dataclasses import replace

import pytest
import torch
from draft_parts import (
    HEAD,
    PARALLEL,
    RESERVED,
    a_batch,
    a_model,
    a_teacher,
    assert_same_gradients,
    documents,
    loop_parts,
)
from loop_reference import Loop, peagle

from specctl.core.depths import Elements
from specctl.core.modules import DraftCache, DraftModel
from specctl.core.slots import scored, slots_of
from specctl.drafts import eagle3
from specctl.drafts.peagle import sample_chains, scored_states, segments, training_loss
from specctl.errors import UsageError
from specctl.records.draft import DraftBatch, DraftSettings, LossReport

ONE = ((0, 0, 1, 1, 1, 1, 1, 1, 1, 1),)
PACKED = ((1, 1, 1, 1, 1), (0, 1, 1), (1,), (1, 1), (0, 0, 1, 1, 1, 0, 1, 1))
HEADS = {
    "llama": PARALLEL,
    "normed residual and input": replace(PARALLEL, norm_before_residual=True, norm_before_fc=True),
    "qwen3, three layers, fc_norm": replace(PARALLEL, block="qwen3", num_hidden_layers=3, fc_norm=True),
    "biases, whole vocabulary": replace(PARALLEL, attention_bias=True, draft_vocab_size=PARALLEL.vocab_size),
    "sliding window": replace(
        PARALLEL, num_hidden_layers=2, sliding_window=2, layer_types=("sliding_attention", "full_attention")
    ),
}


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(model: DraftModel, batch: DraftBatch, settings: DraftSettings) -> LossReport:
    model.zero_grad(set_to_none=True)
    found = training_loss(model, batch, teacher=a_teacher(model), settings=settings, generator=seeded())
    found.loss.backward()
    return found


def chains_of(batch: DraftBatch, settings: DraftSettings) -> Elements:
    scored_NK = scored(batch, slots_of(batch), settings.num_draft_tokens)
    return sample_chains(scored_NK, ratio=settings.cod_ratio, floor=settings.cod_floor, generator=seeded())


def assert_equals_the_loop(head, masks, settings, *, padding=0, dtype=torch.float64, tolerance=1e-9):
    model, batch = a_model(head, dtype=dtype), a_batch(head, masks, padding=padding, dtype=dtype)
    found = run(model, batch, settings)
    chains, slots = chains_of(batch, settings), slots_of(batch)
    places = zip(slots.tokens_N[chains.slots_M].tolist(), chains.depths_M.tolist(), strict=True)
    elements = [(token, depth) for token, depth in places]
    weights, plain = loop_parts(model, a_teacher(model))
    pairs = []
    for start, end, document in zip(batch.offsets, batch.offsets[1:], documents(batch), strict=False):
        own = [(token - start, depth) for token, depth in elements if start <= token < end]
        pairs.append(peagle(Loop(head, weights, document, plain), own, settings.depth_decay, RESERVED, settings.loss))
    loss = sum(p[0] for p in pairs)
    loss.backward()
    assert abs(float(found.weight) - sum(p[1] for p in pairs)) < 1e-9
    assert abs(float(found.loss.detach()) - float(loss.detach())) <= tolerance * max(1.0, float(loss.detach()))
    assert_same_gradients(model, weights, tolerance)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("masks", [ONE, PACKED], ids=["one document", "packed"])
def test_loss_and_every_gradient_equal_the_loop(depth: int, masks) -> None:
    assert_equals_the_loop(PARALLEL, masks, DraftSettings(depth, cod_ratio=1.0), padding=3)


@pytest.mark.parametrize(("ratio", "floor"), [(0.8, 0.2), (0.7, 0.2), (0.5, 0.0), (0.0, 0.5)])
def test_sampled_depths_equal_the_loop(ratio: float, floor: float) -> None:
    assert_equals_the_loop(PARALLEL, PACKED + ONE, DraftSettings(5, cod_ratio=ratio, cod_floor=floor))


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_every_kind_of_head_equals_the_loop(head) -> None:
    assert_equals_the_loop(head, PACKED, DraftSettings(4, depth_decay=1.0))


def test_float32_equals_the_loop_to_rounding() -> None:
    assert_equals_the_loop(PARALLEL, PACKED, DraftSettings(4), dtype=torch.float32, tolerance=1e-5)


def test_cross_entropy_equals_the_loop() -> None:
    assert_equals_the_loop(PARALLEL, PACKED, DraftSettings(4, loss="ce"))


@pytest.mark.parametrize("count", [2, 3, 7, 100])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_segments_change_neither_loss_nor_any_gradient(count: int, is_checkpointed: bool) -> None:
    model = a_model(HEADS["qwen3, three layers, fc_norm"])
    batch, whole = a_batch(PARALLEL, PACKED + ONE), DraftSettings(4)
    expected = run(model, batch, whole)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    found = run(model, batch, replace(whole, num_segments=count, checkpoint_layers=is_checkpointed))
    assert torch.allclose(found.loss, expected.loss, rtol=1e-12)
    assert found.prefix_hits.tolist() == expected.prefix_hits.tolist()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, gradients[name], atol=1e-12), name


def test_segments_part_the_elements_between_chains() -> None:
    chains = chains_of(a_batch(PARALLEL, PACKED + ONE), DraftSettings(4, cod_ratio=1.0))
    for count in (1, 2, 5, 1000):
        parts = segments(chains, count)
        assert len(parts) <= count
        assert [i for part in parts for i in range(part.start, part.stop)] == list(range(len(chains)))
        owners = [set(chains.slots_M[part].tolist()) for part in parts]
        assert sum(map(len, owners)) == len(set().union(*owners))


def test_b1_one_depth_is_step_zero_of_eagle3() -> None:
    model, batch, settings = a_model(PARALLEL), a_batch(PARALLEL, PACKED), DraftSettings(1)
    found = run(model, batch, settings)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    expected = eagle3.training_loss(model, batch, teacher=a_teacher(model), settings=settings)
    expected.loss.backward()
    assert torch.allclose(found.loss, expected.loss, rtol=1e-12)
    for name, parameter in model.named_parameters():
        other = gradients[name]
        assert (parameter.grad is None and other is None) or torch.allclose(parameter.grad, other, atol=1e-12), name


def test_a_chain_starts_at_a_slot_and_stays_in_its_document() -> None:
    """An anchor of -1 reads the last document; a chain across documents learns another text (Automodel#2464)."""
    batch = a_batch(PARALLEL, ((1, 1, 1), (1, 1, 1, 1), (1,), (1, 1, 1, 1, 1)), padding=2)
    slots = slots_of(batch)
    for seed in range(20):
        scored_NK = scored(batch, slots, 5)
        chains = sample_chains(scored_NK, ratio=1.0, floor=1.0, generator=seeded(seed))
        tokens = slots.tokens_N[chains.slots_M]
        ends = slots.ends_N[chains.slots_M]
        assert int(chains.slots_M.min()) >= 0
        assert bool((tokens + chains.depths_M + 2 < ends).all())


@pytest.mark.parametrize(("ratio", "floor"), [(0.8, 0.2), (0.5, 0.0), (1.0, 0.0)])
def test_sampling_keeps_its_share_and_only_whole_chains(ratio: float, floor: float) -> None:
    batch = a_batch(PARALLEL, ((0,) * 10 + (1,) * 90,))
    scored_NK = scored(batch, slots_of(batch), 8)
    chains = sample_chains(scored_NK, ratio=ratio, floor=floor, generator=seeded())
    held = {d: set(chains.slots_M[chains.depths_M == d].tolist()) for d in range(1, 8)}
    for depth in range(1, 8):
        # Depth d is scored on x[p+2+d]; slots scored at each of 1..d number 90 - (d - 1).
        assert len(held[depth]) == int((90 - (depth - 1)) * max(ratio**depth, floor))
        assert depth == 1 or held[depth] <= held[depth - 1]
        assert all(scored_NK[slot, depth] for slot in held[depth])


def test_the_same_seed_draws_the_same_elements_whatever_else_is_drawn() -> None:
    scored_NK = scored(batch := a_batch(PARALLEL, PACKED + ONE), slots_of(batch), 4)
    torch.manual_seed(1)
    one = sample_chains(scored_NK, ratio=0.5, floor=0.2, generator=seeded())
    torch.manual_seed(2)
    other = sample_chains(scored_NK, ratio=0.5, floor=0.2, generator=seeded())
    assert torch.equal(one.slots_M, other.slots_M)
    assert torch.equal(one.depths_M, other.depths_M)


def trained(model: DraftModel, batch: DraftBatch, settings: DraftSettings) -> None:
    """Make `model` one that has learnt the batch: its loss falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        losses.append(float(run(model, batch, settings).loss.detach()))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("is_trained", [False, True], ids=["random", "trained"])
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_b6_the_training_forward_equals_the_flat_layout_that_a_server_runs(head, is_trained, dtype, tolerance) -> None:
    """B6: slots 0..p with real tokens and states, then K - 1 of the reserved token and `mask_hidden`, plainly causal.

    Source: vllm `spec_decode/utils.py`, `copy_and_expand_eagle_inputs`.
    """
    model, depth = a_model(head, dtype=dtype), 4
    batch = a_batch(head, ((1,) * 9, (1,) * 6), dtype=dtype)
    slots, settings = slots_of(batch), DraftSettings(depth, cod_ratio=1.0)
    if is_trained:
        trained(model, batch, settings)
    chains = chains_of(batch, settings)
    first = torch.arange(len(slots.tokens_N))
    normed, elements = scored_states(model, batch, slots, (first, chains), settings=settings)
    found = {
        (s, d): i for i, (s, d) in enumerate(zip(elements.slots_M.tolist(), elements.depths_M.tolist(), strict=True))
    }
    logits = model.logits(normed).detach()
    served = torch.empty_like(logits)
    for slot in first.tolist():
        begin, token = batch.offsets[int(slots.tokens_N[slot]) >= batch.offsets[1]], int(slots.tokens_N[slot])
        real = slice(begin, token + 1)
        ids = torch.cat((batch.input_ids[begin + 1 : token + 2], *[model.reserved_id()] * (depth - 1)))
        hidden = torch.cat((model.project(batch.aux[real]), *[model.masked_projection()] * (depth - 1)))
        flat = model.logits(model.norm(DraftCache(model).run(ids, hidden)))[-depth:].detach()
        for d in range(depth):
            if (slot, d) in found:
                served[found[slot, d]] = flat[d]
    assert float((logits - served).norm() / served.norm()) <= tolerance


def test_everything_that_depth_needs_gets_a_gradient_and_nothing_frozen_moves() -> None:
    model = a_model(PARALLEL)
    model.embed_tokens.weight.requires_grad_(False)
    run(model, a_batch(PARALLEL, ONE), DraftSettings(3, cod_ratio=1.0))
    assert model.embed_tokens.weight.grad is None
    assert all(p.grad.any() for n, p in model.named_parameters() if n != "embed_tokens.weight")


def test_the_reserved_row_of_a_trained_embedding_learns() -> None:
    model = a_model(PARALLEL)
    run(model, a_batch(PARALLEL, ONE), DraftSettings(3, cod_ratio=1.0))
    assert model.embed_tokens.weight.grad[RESERVED].any()
    run(model, a_batch(PARALLEL, ONE), DraftSettings(1))
    assert not model.embed_tokens.weight.grad[RESERVED].any()
    assert model.mask_hidden.grad is None


def test_a_head_without_a_reserved_token_is_refused() -> None:
    with pytest.raises(UsageError, match="reserved token"):
        run(a_model(HEAD), a_batch(HEAD, ONE), DraftSettings(2))

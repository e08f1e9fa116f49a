"""Speculative decoding gives plain greedy text, and a draft that knows a text by heart is accepted throughout."""

from dataclasses import replace

import pytest
import torch
from draft_parts import HEAD

from specctl.core.capture import Recorder, record
from specctl.core.decode import Decoded, decode_greedily
from specctl.core.losses import make_teacher
from specctl.core.modules import DraftModel
from specctl.core.target import LoadedTarget, describe_target, load_target
from specctl.drafts import eagle3, peagle
from specctl.errors import UsageError
from specctl.records.draft import DraftBatch, DraftSettings
from specctl.records.head import HeadConfig

PROMPT, NEW, K = [256, 7, 42, 99, 7, 3], 26, 3
DRAFTS = {"eagle3": eagle3, "peagle": peagle}


def a_target(tiny, name: str) -> LoadedTarget:
    return load_target(describe_target(tiny(name)), dtype="float32", device=torch.device("cpu"))


def a_head(target: LoadedTarget, kind: str, **more) -> HeadConfig:
    last = target.spec.num_layers
    return replace(
        HEAD,
        hidden_size=24,
        intermediate_size=48,
        head_dim=6,
        vocab_size=target.spec.vocab_size,
        draft_vocab_size=target.spec.vocab_size,
        target_hidden_size=target.spec.hidden_size,
        num_aux=3,
        aux_ids=(1, 0, last),
        parallel_drafting=kind == "peagle",
        mask_token_id=263,
        **more,
    )


def plain(target: LoadedTarget, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by reading everything again for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(target.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def a_sample(target: LoadedTarget, head: HeadConfig, tokens: list[int], num_prompt: int) -> DraftBatch:
    recorder = Recorder()
    slots = (*map(str, head.aux_ids), "norm")
    with torch.inference_mode(), record(target.decoder, slots, recorder, model=target.model):
        target.model(torch.tensor([tokens]), use_cache=False)
    states = recorder.take(slots, target.model)
    aux = torch.cat([states[s][0] for s in slots[:-1]], -1).clone()
    mask = (torch.arange(len(tokens)) >= num_prompt).to(torch.uint8)
    return DraftBatch(torch.tensor(tokens), (0, len(tokens)), mask, aux, states["norm"][0].clone())


def learn_by_heart(target: LoadedTarget, kind: str, batch: DraftBatch, **more) -> DraftModel:
    """A few hundred steps on one sample; the vocabulary is reduced to the sample's tokens and some others."""
    ids = torch.unique(torch.cat((batch.input_ids, torch.arange(40))))
    head = a_head(target, kind, **more)
    model = DraftModel(replace(head, draft_vocab_size=len(ids)), generator=torch.Generator().manual_seed(0))
    model.set_vocabulary(ids)
    teacher = make_teacher(target.model.get_output_embeddings().weight, ids)
    settings = DraftSettings(K, loss="ce", depth_decay=1.0, cod_ratio=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    draws = torch.Generator().manual_seed(0)
    for _ in range(300):
        found = DRAFTS[kind].training_loss(model, batch, teacher=teacher, settings=settings, generator=draws)
        (found.loss / found.weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if float(found.loss.detach() / found.weight) < 0.01:
            break
    assert found.simulated_acceptance_length() == pytest.approx(K + 1)
    return model


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("norms", [{}, {"norm_before_residual": True, "norm_output": True, "num_hidden_layers": 2}])
def test_a_text_known_by_heart_is_accepted_throughout(kind: str, norms: dict, tiny) -> None:
    """Training and decoding that disagree by one anywhere (token, state, position, mask) accept little here."""
    target = a_target(tiny, "llama")
    text = plain(target, PROMPT, NEW)
    batch = a_sample(target, a_head(target, kind), PROMPT + text, len(PROMPT))
    draft = learn_by_heart(target, kind, batch, **norms)
    found = decode_greedily(target, draft, PROMPT, max_new_tokens=NEW, num_draft_tokens=K)
    assert list(found.tokens) == text
    assert found.accepted == found.proposed
    assert found.acceptance_length() == K + 1


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3", "gemma2", "gemma3", "moe", "hybrid"])
@pytest.mark.parametrize("kind", DRAFTS)
def test_any_draft_leaves_the_greedy_text_alone(kind: str, family: str, tiny) -> None:
    target = a_target(tiny, family)
    draft = DraftModel(a_head(target, kind), generator=torch.Generator().manual_seed(3))
    found = decode_greedily(target, draft, PROMPT, max_new_tokens=20, num_draft_tokens=4)
    assert list(found.tokens) == plain(target, PROMPT, 20)
    assert found.proposed[0] == found.num_drafts
    assert all(a <= p for a, p in zip(found.accepted, found.proposed, strict=True))


def test_without_a_draft_it_is_plain_greedy_decoding(tiny) -> None:
    target = a_target(tiny, "llama")
    found = decode_greedily(target, None, PROMPT, max_new_tokens=9)
    assert list(found.tokens) == plain(target, PROMPT, 9)
    assert (found.num_drafts, found.acceptance_length()) == (0, None)


@pytest.mark.parametrize("kind", DRAFTS)
def test_decoding_ends_with_a_stop_token_even_inside_an_accepted_draft(kind: str, tiny) -> None:
    target = a_target(tiny, "llama")
    text = plain(target, PROMPT, NEW)
    draft = learn_by_heart(target, kind, a_sample(target, a_head(target, kind), PROMPT + text, len(PROMPT)))
    for place in range(NEW):
        stop = text[place]
        found = decode_greedily(target, draft, PROMPT, max_new_tokens=NEW, num_draft_tokens=K, stop_ids=(stop,))
        assert list(found.tokens) == text[: text.index(stop) + 1]


def test_the_reserved_token_may_be_generated_and_is_kept(tiny) -> None:
    """Trimming by the value of the reserved id would lose it (NVIDIA-NeMo/Automodel#3268)."""
    target = a_target(tiny, "llama")
    text = plain(target, PROMPT, 12)
    head = replace(a_head(target, "peagle"), mask_token_id=text[4])
    found = decode_greedily(target, DraftModel(head), PROMPT, max_new_tokens=12, num_draft_tokens=3)
    assert list(found.tokens) == text


def test_a_draft_that_does_not_name_its_states_is_refused(tiny) -> None:
    target = a_target(tiny, "llama")
    draft = DraftModel(replace(a_head(target, "eagle3"), aux_ids=None))
    with pytest.raises(UsageError, match="which of the target's states"):
        decode_greedily(target, draft, PROMPT, max_new_tokens=2)


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert Decoded((1, 2, 3), 2, (2, 2), (2, 1)).acceptance_length() == 2.5

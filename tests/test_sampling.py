"""Sampled decoding draws from the target's own distribution, and accepts as often as the theory says.

Source: arXiv 2211.17192, Theorem 1 and Definition 3.1; vllm-project/vllm#16899 (drafts that take their likeliest).
"""

import math

import pytest
import torch
from decode_parts import PROMPTS, a_draft, a_target, requests_of

from specctl.core.decode import decode_here
from specctl.core.sampling import Sampler, draw, row_generator, uniforms, verify_greedily, verify_sampled
from specctl.core.speculate import DecodeSettings
from specctl.errors import UsageError

DRAWS, VOCAB, K = 200_000, 8, 3
RULES = (Sampler(1.0), Sampler(0.7, top_k=4), Sampler(1.3, top_p=0.8), Sampler(1.0, top_p=0.9, top_k=5))


def tables(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
    """Next-token distributions of a target and a draft after each token, [V, V] each."""
    logits = 1.5 * torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
    return sampler.odds(logits[0]), Sampler(sampler.temperature).odds(logits[1] + logits[0] / 2)


def speculated(
    p_VV: torch.Tensor, q_VV: torch.Tensor, depth: int, *, is_drawn: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many steps after token 0: what was written, [N, depth + 1] with -1 where nothing was, and drafts kept [N]."""
    draws = torch.Generator().manual_seed(1)
    at, drafted, odds = torch.zeros(DRAWS, dtype=torch.int64), [], []
    for _ in range(depth):
        odds.append(q_VV[at])
        at = draw(q_VV[at], uniforms([draws], DRAWS, p_VV.device)[0]) if is_drawn else q_VV[at].argmax(-1)
        drafted.append(at)
    ids = torch.stack(drafted, 1)
    p = p_VV[torch.cat((torch.zeros(DRAWS, 1, dtype=torch.int64), ids), 1)]
    q = torch.stack(odds, 1) if is_drawn else None
    numbers = torch.rand(DRAWS, depth + 1, dtype=torch.float64, generator=draws)
    kept, following = verify_sampled(p, ids, q, numbers)
    places = torch.arange(depth + 1)
    written = torch.where(places < kept[:, None], torch.cat((ids, ids[:, :1]), 1), -1)
    return torch.where(places == kept[:, None], following[:, None], written), kept


def assert_drawn_from(p_V: torch.Tensor, tokens: torch.Tensor) -> None:
    """Chi-square at p > 0.001, and nothing where the distribution is 0."""
    counts, wanted = torch.bincount(tokens, minlength=len(p_V)).double(), p_V.double() * len(tokens)
    assert not counts[wanted == 0].any()
    seen = wanted > 0
    freedom = int(seen.sum()) - 1
    if freedom == 0:
        return
    statistic = float(((counts - wanted)[seen] ** 2 / wanted[seen]).sum())
    beyond = torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double())
    assert float(beyond) > 0.001, (statistic, freedom)


@pytest.mark.parametrize("is_drawn", [True, False], ids=["sampled", "argmax"])
@pytest.mark.parametrize("depth", [1, K])
@pytest.mark.parametrize("sampler", RULES, ids=str)
def test_what_is_written_is_drawn_from_the_target(sampler: Sampler, depth: int, is_drawn: bool) -> None:
    """The first token, and every later one after each token that may stand before it."""
    p_VV, q_VV = tables(sampler)
    written, _ = speculated(p_VV, q_VV, depth, is_drawn=is_drawn)
    assert_drawn_from(p_VV[0], written[:, 0])
    for place in range(1, depth + 1):
        for before in range(VOCAB):
            found = written[(written[:, place - 1] == before) & (written[:, place] >= 0), place]
            if len(found) > 200:
                assert_drawn_from(p_VV[before], found)


@pytest.mark.parametrize("sampler", RULES, ids=str)
def test_a_sampled_draft_is_accepted_by_one_less_the_total_variation(sampler: Sampler) -> None:
    p_VV, q_VV = tables(sampler)
    _, kept = speculated(p_VV, q_VV, 1, is_drawn=True)
    assert_share(kept, 1 - float((p_VV[0] - q_VV[0]).abs().sum()) / 2)


@pytest.mark.parametrize("sampler", RULES, ids=str)
def test_a_likeliest_draft_is_accepted_by_its_probability(sampler: Sampler) -> None:
    p_VV, q_VV = tables(sampler)
    _, kept = speculated(p_VV, q_VV, 1, is_drawn=False)
    assert_share(kept, float(p_VV[0, q_VV[0].argmax()]))


@pytest.mark.parametrize(("is_drawn", "wanted"), [(True, 0.5), (False, 0.2)])
def test_the_rate_of_a_worked_example(is_drawn: bool, wanted: float) -> None:
    """Exact match of two samples would give 0.25, and is not what is done."""
    p, q = torch.tensor([0.3, 0.5, 0.2]), torch.tensor([0.2, 0.1, 0.7])
    written, kept = speculated(p.expand(3, 3), q.expand(3, 3), 1, is_drawn=is_drawn)
    assert_share(kept, wanted)
    assert_drawn_from(p, written[:, 0])


def assert_share(kept: torch.Tensor, wanted: float) -> None:
    """Within 3 standard errors."""
    share = float(kept.double().mean())
    assert abs(share - wanted) <= 3 * math.sqrt(wanted * (1 - wanted) / len(kept)) + 1e-12, (share, wanted)


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    p_VV, _ = tables(RULES[0])
    _, kept = speculated(p_VV, p_VV, K, is_drawn=True)
    assert int(kept.min()) == K


def test_a_token_without_weight_is_never_drawn_at_either_end_of_the_numbers() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).expand(3, 5)
    numbers = torch.tensor([0.0, 0.25, 1 - 2**-53], dtype=torch.float64)
    assert draw(weights, numbers).tolist() == [1, 3, 3]


def test_equal_distributions_with_a_refused_token_still_give_a_token() -> None:
    """Rounding can leave nothing of p - q; the token then comes of p."""
    p = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    kept, following = verify_sampled(
        p, torch.tensor([[0]]), torch.tensor([[[0.6, 0.5]]]), torch.tensor([[0.9, 0.7]]).double()
    )
    assert (kept.tolist(), following.tolist()) == ([0], [1])


def test_greedy_verification_keeps_what_is_equal_up_to_the_first_that_is_not() -> None:
    greedy = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafted = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 9]])
    assert verify_greedily(greedy, drafted).tolist() == [3, 1, 0, 2]
    assert verify_greedily(greedy[:, :1], drafted[:, :0]).tolist() == [0, 0, 0, 0]


def test_top_k_and_top_p_keep_the_likeliest_and_share_out_the_rest() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]])
    whole = logits.softmax(-1)
    assert torch.allclose(Sampler(1.0).odds(logits), whole)
    two = torch.where(torch.arange(5) < 2, whole, 0.0)
    assert torch.allclose(Sampler(1.0, top_k=2).odds(logits), two / two.sum())
    # The first alone is 0.64: the second is needed for 0.7, and the third for nothing.
    assert torch.allclose(Sampler(1.0, top_p=0.7).odds(logits), two / two.sum())
    assert Sampler(1.0, top_p=1e-9).odds(logits).tolist() == [[1, 0, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_temperature_next_to_nothing_takes_the_likeliest(temperature: float) -> None:
    odds = Sampler(temperature).odds(torch.tensor([[90.0, 99.0, -40.0]]))
    assert odds.tolist() == [[0, 1, 0]]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"temperature": float("inf")}, "--temperature inf"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"top_k": -1}, "--top-k -1"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Sampler(**values)


def test_the_numbers_of_a_prompt_follow_from_seed_and_name_alone() -> None:
    def first(seed: int, key: str) -> float:
        return float(uniforms([row_generator(seed, key)], 1, torch.device("cpu")))

    assert first(0, "a") == first(0, "a")
    assert len({first(0, "a"), first(0, "b"), first(1, "a")}) == 3


@pytest.mark.parametrize("draws_drafts", [True, False])
@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_same_seed_gives_the_same_text_whatever_the_batch(kind: str, draws_drafts: bool) -> None:
    def text(batch: int, seed: int) -> list[tuple]:
        settings = DecodeSettings(16, 3, (), Sampler(0.8, top_p=0.95, top_k=50), draws_drafts, seed)
        draft = a_draft("llama", kind, draft_vocab_size=200)
        found = decode_here(a_target("llama"), draft, requests_of(), settings=settings, batch=batch)
        return [(d.tokens, d.steps) for d in found]

    alone = text(1, seed=4)
    assert text(2, seed=4) == alone and text(len(PROMPTS), seed=4) == alone
    assert text(1, seed=5) != alone


def test_a_decoded_text_is_drawn_from_the_target() -> None:
    """The whole engine: the second of two tokens, over many seeds, against the target's own distribution."""
    target, prompt, count = a_target("llama"), PROMPTS[0], 400
    sampler = Sampler(1.0, top_k=2)
    draft = a_draft("llama", "eagle3")
    requests = tuple(type(r)(f"{i}", prompt) for i in range(count) for r in requests_of((prompt,)))
    settings = DecodeSettings(2, 2, (), sampler, draws_drafts=True)
    found = decode_here(target, draft, requests, settings=settings, batch=100)
    with torch.inference_mode():
        first = sampler.odds(target.model(torch.tensor([prompt])).logits[0, -1:])[0]
        assert_drawn_from(first, torch.tensor([d.tokens[0] for d in found]))
        for token in first.nonzero()[:, 0].tolist():
            then = sampler.odds(target.model(torch.tensor([[*prompt, token]])).logits[0, -1:])[0]
            assert_drawn_from(then, torch.tensor([d.tokens[1] for d in found if d.tokens[0] == token]))

"""Proposers without a draft, replayed over texts: by hand, against the plainest way to say them, and in time."""

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from specctl.core import tables
from specctl.records.evaluation import Counts, PromptResult


def text(name: str, prompt: Sequence[int], tokens: Sequence[int], *, turn: int = 0) -> PromptResult:
    return PromptResult(name, None, turn, tuple(prompt), tuple(tokens), 0, (), (), (), "length")


def test_prompt_lookup_by_hand() -> None:
    # 1 comes with the prompt. After 4 1 nothing stood before: one plain step gives 2. After 1 2 stood 3 4: both
    # kept, and 1 follows. After 3 4 1 stood 2: room for one token, kept, and 9 ends the text.
    [counts] = tables.prompt_lookup([text("a", [1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 9])], 2)
    assert counts == Counts(1, 7, 3, 2, (2, 1), (2, 1), (2, 1))


def test_prompt_lookup_takes_the_longest_match_and_of_those_the_latest() -> None:
    # 2 3 was last followed by 7, 1 2 3 last by 6.
    found = tables.prompt_lookup([text("a", [1, 2, 3, 5, 1, 2, 3, 6, 8, 2, 3, 7, 1, 2], [3, 6, 0])], 1)
    assert found[0].accepted == (1,)


def test_the_trigram_table_leaves_a_prompts_own_answers_out() -> None:
    alone = [text("a", [0], [1, 2, 3, 4, 1, 2, 3, 4]), text("a", [0], [1, 2, 3, 4], turn=1)]
    assert all(counts.num_drafts == 0 for counts in tables.trigram_table(alone, 2))
    both = [*alone, text("b", [0], [1, 2, 3, 4])]
    assert all(counts.accepted[0] > 0 for counts in tables.trigram_table(both, 2))


def test_the_trigram_table_falls_back_to_the_last_token() -> None:
    # 9 1 was never seen, 1 was, with 2 after it; 1 2 and 2 3 were.
    [counts, _] = tables.trigram_table([text("a", [9], [1, 2, 3, 4, 0]), text("b", [0], [5, 1, 2, 3, 4, 8])], 3)
    assert counts == Counts(1, 5, 1, 1, (1, 1, 1), (1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize("tokens", [[], [5], [5, 5]])
def test_texts_too_short_for_a_draft_count_none(tokens: list[int]) -> None:
    for find in (tables.prompt_lookup, tables.trigram_table):
        [counts] = find([text("a", [5, 5, 5], tokens)], 4)
        assert (counts.num_drafts, counts.steps, counts.tokens) == (0, max(len(tokens) - 1, 0), len(tokens))


def naive_lookup(known: Sequence[int], count: int) -> Sequence[int]:
    for size in (3, 2):
        for start in range(len(known) - size - 1, -1, -1):
            if len(known) > size and list(known[start : start + size]) == list(known[-size:]):
                return known[start + size : start + size + count]
    return ()


def followers(texts: list[tuple[int, ...]], context: list[int]) -> Counter[int]:
    size = len(context)
    return Counter(t[i] for t in texts for i in range(size, len(t)) if [*t[i - size : i]] == context)


def naive_table(others: list[tuple[int, ...]], everything: list[tuple[int, ...]], known: Sequence[int], count: int):
    drafted: list[int] = []
    for _ in range(count):
        last = [*known, *drafted][-2:]
        context = next((c for c in (last, last[-1:]) if followers(others, c)), None)
        if context is None:
            break
        left, whole = followers(others, context), followers(everything, context)
        # Equals are settled by how often the token follows in all texts, then by its id.
        drafted.append(min(left, key=lambda token: (-left[token], -whole[token], token)))
    return drafted


def random_texts(count: int, length: int, seed: int, words: int) -> list[PromptResult]:
    rng = random.Random(seed)
    follow = {w: rng.choices(range(words), k=3) for w in range(words)}

    def walk(steps: int) -> list[int]:
        found = [rng.randrange(words)]
        while len(found) < steps:
            found.append(rng.choice(follow[found[-1]]) if rng.random() < 0.9 else rng.randrange(words))
        return found

    return [text(f"p{i}", walk(40), walk(length)) for i in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_both_say_what_the_plainest_search_says(seed: int) -> None:
    texts = random_texts(5, 60, seed, words=8)
    lookup, trigram = tables.prompt_lookup(texts, 4), tables.trigram_table(texts, 4)
    everything = [t.tokens for t in texts]
    for i, one in enumerate(texts):
        assert lookup[i] == tables.replay(one, naive_lookup, 4)
        others = [t.tokens for t in texts if t.id != one.id]
        assert trigram[i] == tables.replay(one, lambda k, n, o=others: naive_table(o, everything, k, n), 4)
        assert sum(lookup[i].accepted) + lookup[i].steps == len(one.tokens) - 1


def test_64_prompts_of_256_tokens_take_less_than_two_seconds() -> None:
    texts = random_texts(64, 256, 0, words=2000)
    before = time.process_time()
    names = [baseline.name for baseline in tables.baselines(texts, 8)]
    assert time.process_time() - before < 2
    assert names == ["prompt lookup", "trigram table"]

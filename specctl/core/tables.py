"""What proposers without a draft would have gained on texts that are there: a head should beat them. No torch.

Replayed over greedy texts: the target is not asked again, since its next tokens are known. A step proposes, and
accepts what the text has; counts mean what they mean for a draft (records/evaluation.py). Where nothing is
found the step is one of plain decoding, so the two are compared by tokens per step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from specctl.records.evaluation import Baseline, Counts, PromptResult, Step, count_steps

LOOKUP: Final = "prompt lookup"
TRIGRAM: Final = "trigram table"
_LONGEST: Final = 3
_SHORTEST: Final = 2

_Context: TypeAlias = tuple[int, ...]
_Ranked: TypeAlias = list[tuple[int, int]]
"""Tokens with their counts, the most frequent first."""


def baselines(texts: Sequence[PromptResult], num_draft_tokens: int) -> tuple[Baseline, ...]:
    """Both proposers over the same texts, drafting as many tokens as the draft did."""
    return (
        Baseline(LOOKUP, prompt_lookup(texts, num_draft_tokens)),
        Baseline(TRIGRAM, trigram_table(texts, num_draft_tokens)),
    )


def prompt_lookup(texts: Sequence[PromptResult], num_draft_tokens: int) -> tuple[Counts, ...]:
    """Propose what followed the last three tokens, else the last two, where they last stood before.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding, with the latest match for the first.
    """
    return tuple(_looked_up(text, num_draft_tokens) for text in texts)


def trigram_table(texts: Sequence[PromptResult], num_draft_tokens: int) -> tuple[Counts, ...]:
    """Propose the likeliest token after the last two, else after the last one, in the other prompts' answers."""
    everything = _Table([text.tokens for text in texts])
    own: dict[str, list[tuple[int, ...]]] = {}
    for text in texts:
        own.setdefault(text.id, []).append(text.tokens)
    return tuple(_by_table(text, everything, _Table(own[text.id]), num_draft_tokens) for text in texts)


def replay(text: PromptResult, propose: Callable[[Sequence[int], int], Sequence[int]], num_draft_tokens: int) -> Counts:
    """Decode `text` again with `propose(known, count)`, which gives at most `count` tokens after the known ones.

    As in decoding, the first token comes with the prompt, and no draft is longer than what is still to come
    less the target's own token.
    """
    known, end = [*text.prompt_ids, *text.tokens[:1]], len(text.prompt_ids) + len(text.tokens)
    whole = [*text.prompt_ids, *text.tokens]
    steps: list[Step] = []
    while len(known) < end:
        drafted = tuple(propose(known, min(num_draft_tokens, end - len(known) - 1)))
        ahead = whole[len(known) :]
        kept = next((i for i, token in enumerate(drafted) if token != ahead[i]), len(drafted))
        steps.append((drafted, kept))
        known += ahead[: kept + 1]
    return count_steps(steps, num_tokens=len(text.tokens))


def _looked_up(text: PromptResult, num_draft_tokens: int) -> Counts:
    seen: dict[_Context, int] = {}
    indexed = 0

    def propose(known: Sequence[int], count: int) -> Sequence[int]:
        nonlocal indexed
        # Up to the token before the last: what ends at the last one is what is looked for.
        for end in range(indexed + 1, len(known)):
            for size in range(_SHORTEST, _LONGEST + 1):
                if end >= size:
                    seen[tuple(known[end - size : end])] = end
        indexed = max(indexed, len(known) - 1)
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            start = seen.get(tuple(known[-size:])) if len(known) >= size else None
            if start is not None:
                return known[start : start + count]
        return ()

    return replay(text, propose, num_draft_tokens)


class _Table:
    """What follows each pair and each single token, counted; a class for the ranks it finds once."""

    def __init__(self, texts: Sequence[tuple[int, ...]]) -> None:
        self.after: dict[_Context, Counter[int]] = {}
        for tokens in texts:
            for i in range(1, len(tokens)):
                for context in {tokens[max(i - 2, 0) : i], tokens[i - 1 : i]}:
                    self.after.setdefault(context, Counter())[tokens[i]] += 1
        self._ranked: dict[_Context, _Ranked] = {}

    def ranked(self, context: _Context) -> _Ranked:
        """Tokens after `context`, most frequent first, the smaller id first among equals."""
        if context not in self._ranked:
            counted = self.after.get(context, Counter[int]())
            self._ranked[context] = sorted(counted.items(), key=lambda item: (-item[1], item[0]))
        return self._ranked[context]


def _by_table(text: PromptResult, everything: _Table, own: _Table, num_draft_tokens: int) -> Counts:
    found: dict[_Context, int | None] = {}

    def follows(context: _Context) -> int | None:
        if context not in found:
            found[context] = _likeliest(everything.ranked(context), own.after.get(context, {}))
        return found[context]

    def propose(known: Sequence[int], count: int) -> Sequence[int]:
        drafted: list[int] = []
        last = tuple(known[-2:])
        while len(drafted) < count:
            token = follows(last)
            token = follows(last[-1:]) if token is None else token
            if token is None:
                break
            drafted.append(token)
            last = (last[-1], token)
        return drafted

    return replay(text, propose, num_draft_tokens)


def _likeliest(ranked: _Ranked, own: Mapping[int, int]) -> int | None:
    """The most frequent token once a prompt's own counts are taken off; None where nothing is left."""
    best, most = None, 0
    for token, count in ranked:
        if count <= most and best is not None:
            # No later one can have more left than this one had before anything was taken off.
            break
        if count - own.get(token, 0) > most:
            best, most = token, count - own.get(token, 0)
    return best

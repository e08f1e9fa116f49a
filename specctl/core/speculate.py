"""Speculative decoding of a batch of prompts that advance at their own pace; runs where the target's head is.

A batch says what the target reads next (an order), takes the states that come of it, keeps what the target
agrees to, and lets the draft propose again. Source: arXiv 2211.17192; slots as vllm `spec_decode/utils.py`.

Legend: B rows, Q columns of an order, K draft tokens, D target hidden size, A*D aux width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specctl.core.draftrows import DraftRows
from specctl.core.modules import DraftModel
from specctl.core.sampling import Sampler, draw, row_generator, uniforms, verify_greedily, verify_sampled

Head = Callable[[torch.Tensor], torch.Tensor]
"""Normed states [N, D] to the target's logits [N, V]."""


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """How prompts are continued. `num_draft_tokens` 0 is plain decoding.

    `draws_drafts` lets the draft sample at the target's temperature; else it takes its likeliest token.
    """

    max_new_tokens: int
    num_draft_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    sampler: Sampler = field(default_factory=Sampler)
    draws_drafts: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of at least one token; `key` names it, also for its random numbers."""

    key: str
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A forward of the target after the prompt's: the draft's tokens (none in plain decoding), how many were
    kept (before any cut), and the target's token after.
    """

    drafted: tuple[int, ...]
    accepted: int
    following: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """What became of a request: new tokens up to and with a stop token, and the steps that made them.

    `gaps` are the differences of the target's two best logits at each token, in greedy decoding.
    """

    key: str
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    gaps: tuple[float, ...]
    is_stopped: bool


@dataclass(frozen=True, slots=True)
class Order:
    """What every rank's target reads next for one batch.

    `ids_BQ` int64; row b starts at position starts[b]; `keep` are the rows of the order before that go on,
    none of them in the first.
    """

    ids_BQ: torch.Tensor
    starts: list[int]
    keep: list[int]
    is_first: bool


@dataclass
class _Row:
    """A request under way; `end` is how many of its new tokens count, once it is finished."""

    request: Request
    generator: torch.Generator
    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    end: int | None = None
    is_stopped: bool = False

    def take(self, accepted: int, following: int, settings: DecodeSettings) -> None:
        """Keep so many drafted tokens and the target's own after them; see whether that finishes the row."""
        begin = len(self.request.prompt)
        if len(self.tokens) > begin:
            self.steps.append(Step(tuple(self.drafted), accepted, following))
        fresh = [*self.drafted[:accepted], following]
        at = len(self.tokens) - begin
        self.tokens += fresh
        self.drafted = []
        for count, token in enumerate(fresh[: settings.max_new_tokens - at], at + 1):
            self.is_stopped = token in settings.stop_ids
            if self.is_stopped or count == settings.max_new_tokens:
                self.end = count
                break

    def decoded(self) -> Decoded:
        """The finished row."""
        begin = len(self.request.prompt)
        assert self.end is not None
        tokens, gaps = self.tokens[begin : begin + self.end], self.gaps[: self.end]
        return Decoded(self.request.key, tuple(tokens), tuple(self.steps), tuple(gaps), self.is_stopped)


class Batch:
    """Some requests, decoded together. `can_cache` says that the target keeps what it has read.

    All rows read their prompt in the first order, and a token and K drafted ones in each that follows.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        draft: DraftModel | None,
        head: Head,
        *,
        settings: DecodeSettings,
        can_cache: bool,
        device: torch.device,
    ) -> None:
        self._settings, self._head, self._device = settings, head, device
        self._draft, self._can_cache = draft, can_cache
        self._draft_rows = None if draft is None or not settings.num_draft_tokens else DraftRows(draft)
        self._rows = [_Row(r, row_generator(settings.seed, r.key), list(r.prompt)) for r in requests]
        self._read = [0] * len(requests)
        self._odds_BKV: torch.Tensor | None = None
        self.finished: list[Decoded] = []

    def order(self) -> Order:
        """What to read first: the prompts."""
        return self._order([])

    @torch.inference_mode()
    def advance(self, states_BQA: torch.Tensor, normed_BQD: torch.Tensor) -> Order | None:
        """Take what the last order gave, on its columns; the next order, or None when all rows are finished."""
        columns = [self._columns(row, read) for row, read in zip(self._rows, self._read, strict=True)]
        accepted, following = self._verify(normed_BQD, columns)
        known = self._read
        for row, kept, token in zip(self._rows, accepted, following, strict=True):
            row.take(kept, token, self._settings)
        keep = [b for b, row in enumerate(self._rows) if row.end is None]
        self.finished += [row.decoded() for row in self._rows if row.end is not None]
        if not keep:
            return None
        self._propose(states_BQA, columns, known, keep)
        self._rows = [self._rows[b] for b in keep]
        self._read = [len(row.tokens) - 1 for row in self._rows]
        return self._order(keep)

    def _columns(self, row: _Row, read: int) -> slice:
        """The columns of an order that hold new tokens: those after the first `read`, drafts included."""
        begin = 0 if self._can_cache else read
        return slice(begin, begin + len(row.tokens) + len(row.drafted) - read)

    def _order(self, keep: list[int]) -> Order:
        starts = [read if self._can_cache else 0 for read in self._read]
        texts = [[*row.tokens[start:], *row.drafted] for row, start in zip(self._rows, starts, strict=True)]
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        return Order(ids.to(self._device), starts, keep, is_first=not keep)

    def _verify(self, normed_BQD: torch.Tensor, columns: Sequence[slice]) -> tuple[list[int], list[int]]:
        """How many drafted tokens each row keeps, and the target's token after them."""
        rows, depth = self._rows, len(self._rows[0].drafted)
        wanted = torch.stack([normed_BQD[b, c.stop - depth - 1 : c.stop] for b, c in enumerate(columns)])
        logits_NV = self._head(wanted.flatten(0, 1))
        drafted = torch.tensor([row.drafted for row in rows], dtype=torch.int64, device=logits_NV.device)
        sampler = self._settings.sampler
        if not sampler.is_greedy:
            odds = sampler.odds(logits_NV).view(len(rows), depth + 1, -1)
            draws = uniforms([row.generator for row in rows], depth + 1, odds.device)
            kept, following = verify_sampled(odds, drafted, self._odds_BKV, draws)
            return kept.tolist(), following.tolist()
        greedy, gaps = (x.view(len(rows), depth + 1) for x in _best(logits_NV))
        accepted: list[int] = verify_greedily(greedy, drafted).tolist()
        for row, count, distances in zip(rows, accepted, gaps.tolist(), strict=True):
            row.gaps += distances[: count + 1]
        return accepted, [tokens[count] for tokens, count in zip(greedy.tolist(), accepted, strict=True)]

    def _propose(
        self, states_BQA: torch.Tensor, columns: Sequence[slice], known: Sequence[int], keep: Sequence[int]
    ) -> None:
        """Let the draft see the tokens that were kept, and propose what follows them."""
        if self._draft_rows is None:
            return
        if len(keep) < len(self._rows):
            self._draft_rows.keep(torch.tensor(keep, device=self._device))
        rows, starts = [self._rows[b] for b in keep], [known[b] for b in keep]
        counts = [len(row.tokens) - 1 - start for row, start in zip(rows, starts, strict=True)]
        ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
        states = states_BQA.new_zeros(len(rows), max(counts), states_BQA.shape[2])
        for i, (b, row, start, count) in enumerate(zip(keep, rows, starts, counts, strict=True)):
            ids[i, :count] = torch.tensor(row.tokens[start + 1 :])
            states[i, :count] = states_BQA[b, columns[b].start : columns[b].start + count]
        proposed = self._draft_rows.propose(
            ids.to(self._device),
            states,
            starts,
            counts=counts,
            num_tokens=self._settings.num_draft_tokens,
            choose=self._chooser([row.generator for row in rows]),
        )
        for row, drafted in zip(rows, proposed.ids_BK.tolist(), strict=True):
            row.drafted = drafted
        self._odds_BKV = None if proposed.odds_BKW is None else self._spread(proposed.odds_BKW)

    def _chooser(
        self, generators: Sequence[torch.Generator]
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
        sampler = self._settings.sampler
        if sampler.is_greedy or not self._settings.draws_drafts:
            return lambda logits_BW: (logits_BW.argmax(-1), None)
        plain = Sampler(sampler.temperature)

        def choose(logits_BW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            odds = plain.odds(logits_BW)
            return draw(odds, uniforms(generators, 1, odds.device)[:, 0]), odds

        return choose

    def _spread(self, odds_BKW: torch.Tensor) -> torch.Tensor:
        """[B, K, V] over the target's vocabulary."""
        assert self._draft is not None
        vocabulary = self._draft.vocabulary()
        if vocabulary is None:
            return odds_BKW
        spread = odds_BKW.new_zeros(*odds_BKW.shape[:2], self._draft.head.vocab_size)
        return spread.index_copy_(2, vocabulary, odds_BKW)


def _best(logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens [N], and how far their logits lie above the next best [N]; overwrites the former.

    By argmax, as plain decoding takes them: a sort may order equal logits either way, and takes twice the time.
    """
    best_N1 = logits_NV.argmax(-1, keepdim=True)
    top_N1 = logits_NV.gather(1, best_N1)
    rest_N = logits_NV.scatter_(1, best_N1, -torch.inf).amax(-1)
    return best_N1[:, 0], top_N1[:, 0] - rest_N

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
from specctl.core.sampling import Sampler, Verdict, draw, row_generator, verify_greedily, verify_sampled

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
    request: Request
    generator: torch.Generator
    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    odds: torch.Tensor | None = None
    steps: list[Step] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    @property
    def new(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


class Batch:
    """Some requests, decoded together. `can_cache` says that the target keeps what it has read."""

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
        self.finished: list[Decoded] = []

    def order(self) -> Order:
        """What to read first: the prompts."""
        return self._order([])

    @torch.inference_mode()
    def advance(self, states_BQA: torch.Tensor, normed_BQD: torch.Tensor) -> Order | None:
        """Take what the last order gave, on its columns; the next order, or None when all rows are finished."""
        counts = [len(row.tokens) + len(row.drafted) - read for row, read in zip(self._rows, self._read, strict=True)]
        columns = [self._columns(row, read) for row, read in zip(self._rows, self._read, strict=True)]
        verdicts = self._verify(normed_BQD, columns)
        known = self._read
        self._read = []
        for row, verdict, count in zip(self._rows, verdicts, counts, strict=True):
            self._take(row, verdict)
            self._read.append(len(row.tokens) - 1)
            assert count > 0
        keep = [b for b, row in enumerate(self._rows) if not self._is_finished(row)]
        self.finished += [self._decoded(row) for row in self._rows if self._is_finished(row)]
        if not keep:
            return None
        self._propose(states_BQA, columns, known, keep)
        self._rows = [self._rows[b] for b in keep]
        self._read = [self._read[b] for b in keep]
        return self._order(keep)

    def _columns(self, row: _Row, read: int) -> slice:
        """The columns of an order that hold new tokens: those after the first `read`, drafts included."""
        begin = 0 if self._can_cache else read
        return slice(begin, begin + len(row.tokens) + len(row.drafted) - read)

    def _order(self, keep: list[int]) -> Order:
        starts = [read if self._can_cache else 0 for read in self._read]
        texts = [[*row.tokens, *row.drafted][start:] for row, start in zip(self._rows, starts, strict=True)]
        ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
        for b, text in enumerate(texts):
            ids[b, : len(text)] = torch.tensor(text)
        return Order(ids.to(self._device), starts, keep, is_first=not keep)

    def _verify(self, normed_BQD: torch.Tensor, columns: Sequence[slice]) -> list[Verdict]:
        """The verdict on each row's drafts, from the states at its last known token and its drafts."""
        wanted = [
            normed_BQD[b, c.stop - len(row.drafted) - 1 : c.stop]
            for b, (row, c) in enumerate(zip(self._rows, columns, strict=True))
        ]
        logits_NV = self._head(torch.cat(wanted))
        sizes = [len(part) for part in wanted]
        if not self._settings.sampler.is_greedy:
            odds = torch.split(self._settings.sampler.odds(logits_NV), sizes)
            return [verify_sampled(p, r.drafted, r.odds, r.generator) for p, r in zip(odds, self._rows, strict=True)]
        best = logits_NV.topk(2, dim=-1)
        # topk may order equal logits either way; argmax is what plain decoding takes.
        greedy, gaps = logits_NV.argmax(-1).split(sizes), (best.values[:, 0] - best.values[:, 1]).split(sizes)  # type: ignore[no-untyped-call]
        verdicts = []
        for row, tokens, gap in zip(self._rows, greedy, gaps, strict=True):
            verdicts.append(verify_greedily(tokens.tolist(), row.drafted))
            row.gaps += gap[: verdicts[-1].accepted + 1].tolist()
        return verdicts

    def _take(self, row: _Row, verdict: Verdict) -> None:
        if row.new:
            row.steps.append(Step(tuple(row.drafted), verdict.accepted, verdict.following))
        row.tokens += [*row.drafted[: verdict.accepted], verdict.following]
        row.drafted, row.odds = [], None

    def _end(self, row: _Row) -> int:
        """How many new tokens count: up to and with a stop token, within the limit."""
        new = row.new[: self._settings.max_new_tokens]
        return next((i + 1 for i, token in enumerate(new) if token in self._settings.stop_ids), len(new))

    def _is_finished(self, row: _Row) -> bool:
        end = self._end(row)
        return end < len(row.new) or end == self._settings.max_new_tokens or self._is_stopped(row)

    def _is_stopped(self, row: _Row) -> bool:
        end = self._end(row)
        return bool(end) and row.new[end - 1] in self._settings.stop_ids

    def _decoded(self, row: _Row) -> Decoded:
        end = self._end(row)
        return Decoded(
            row.request.key, tuple(row.new[:end]), tuple(row.steps), tuple(row.gaps[:end]), self._is_stopped(row)
        )

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
            choose=self._chooser(rows),
        )
        for row, drafted in zip(rows, proposed.ids_BK.tolist(), strict=True):
            row.drafted = drafted
        if proposed.odds_BKW is not None:
            for row, odds in zip(rows, proposed.odds_BKW, strict=True):
                row.odds = self._spread(odds)

    def _chooser(self, rows: Sequence[_Row]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]:
        sampler = self._settings.sampler
        if sampler.is_greedy or not self._settings.draws_drafts:
            return lambda logits_BW: (logits_BW.argmax(-1), None)
        plain = Sampler(sampler.temperature)

        def choose(logits_BW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            odds = plain.odds(logits_BW)
            drawn = [draw(q, row.generator) for q, row in zip(odds, rows, strict=True)]
            return torch.tensor(drawn, device=logits_BW.device), odds

        return choose

    def _spread(self, odds_KW: torch.Tensor) -> torch.Tensor:
        """[K, V] over the target's vocabulary."""
        assert self._draft is not None
        vocabulary = self._draft.vocabulary()
        if vocabulary is None:
            return odds_KW
        return odds_KW.new_zeros(len(odds_KW), self._draft.head.vocab_size).index_copy_(1, vocabulary, odds_KW)

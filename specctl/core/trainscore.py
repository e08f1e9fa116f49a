"""The held-out score of a draft in training: every rank takes its rows, and the sums are those of all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from specctl.core.modules import DraftModel
from specctl.core.packing import Row, pack
from specctl.core.rowloader import GreedyTokens, load_row, moved
from specctl.core.training import Trainer, autocast
from specctl.records.draft import LossReport
from specctl.records.training import DepthScore, Evaluation

SUMS = ("counts", "losses", "hits", "outside", "prefix_counts", "prefix_hits")
"""What is added up of a report, by depth."""


@torch.no_grad()
def evaluate(trainer: Trainer, step: int, *, greedy: GreedyTokens) -> Evaluation | None:
    """The score over at most `eval_rows` held-out rows; None without held-out samples. Every rank has to ask.

    P-EAGLE's depths are all scored, none left out by chance.
    """
    task, ranks = trainer.task, trainer.replicas
    order = sorted(task.held_out, key=lambda place: place.sample_id)
    rows = list(itertools.islice(pack(order, task.config.batch_tokens, epoch=0), task.config.eval_rows))
    depths = task.settings.num_draft_tokens
    sums = torch.zeros(len(SUMS) * depths + 3, dtype=torch.float64)
    for row in _shared_out(rows, ranks.rank, ranks.size):
        sums += _row_sums(trainer, row, greedy, sums)
    ranks.sum([sums])
    return _evaluation(sums, depths, step, is_labelled=task.settings.loss == "ce") if float(sums[-1]) else None


def _shared_out(rows: Sequence[Row], rank: int, size: int) -> list[Row | None]:
    """The rows of a rank, filled up so that every rank has as many."""
    mine: list[Row | None] = [*rows[rank::size]]
    return mine + [None] * (-(-len(rows) // size) - len(mine))


def _row_sums(trainer: Trainer, row: Row | None, greedy: GreedyTokens, like: torch.Tensor) -> torch.Tensor:
    """float64: the sums of one row by depth, then loss, weight and tokens; zeros without a row."""
    task = trainer.task
    settings = replace(task.settings, cod_ratio=1.0, cod_floor=1.0, num_segments=1)
    batch = None if row is None else load_row(task.corpus, row, greedy).batch

    def forward(model: DraftModel) -> LossReport | None:
        if batch is None:
            return None
        found: LossReport = task.algorithm.training_loss(
            model, moved(batch, task.device), teacher=trainer.teacher, settings=settings
        )
        return found

    with autocast(task):
        report = trainer.model(forward)  # also without a row: a shared model is gathered by all ranks
    if batch is None or report is None:
        return torch.zeros_like(like)
    by_depth = torch.cat([getattr(report, name).double().cpu() for name in SUMS])
    rest = torch.tensor([float(report.loss), float(report.weight), float(batch.input_ids.shape[0])])
    return torch.cat((by_depth, rest.double()))


def _evaluation(sums: torch.Tensor, num_depths: int, step: int, *, is_labelled: bool) -> Evaluation:
    """Rates are shares of all that was scored; with labels, what lies outside the vocabulary has no loss."""
    loss, weight, tokens = sums[-3:].tolist()
    columns = sums[:-3].view(len(SUMS), num_depths).T.tolist()
    depths = []
    for depth, (n, nats, hits, outside, chains, joint) in enumerate(columns):
        every = max(n + outside if is_labelled else n, 1)
        depths.append(DepthScore(depth, nats / max(n, 1), hits / every, joint / max(chains, 1), outside / every))
    acceptance = 1.0 + sum(depth.joint_rate for depth in depths)
    return Evaluation(step, int(tokens), loss / max(weight, 1e-9), acceptance, tuple(depths))

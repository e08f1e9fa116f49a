"""A step of AdamW whose embedding gradient holds some rows is that of a dense one, bit for bit."""

import pytest
import torch

from specctl.core import optimizer
from specctl.core.optimizer import apply_gradients, gradients_of, make_optimizer


def parameters() -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=draw)) for shape in ((50, 8), (8, 4))]


def step(table: torch.Tensor, other: torch.Tensor, ids: torch.Tensor, *, is_sparse: bool) -> None:
    rows = torch.nn.functional.embedding(ids, table, sparse=is_sparse)
    (rows @ other).square().sum().backward()


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
def test_sparse_rows_are_updated_as_dense_ones(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "ROWS_ELEMENTS", 8 * rows_at_once)
    draw = torch.Generator().manual_seed(1)
    runs = []
    batches = [torch.randint(0, 50, (9,), generator=draw) for _ in range(6)]
    for is_sparse in (False, True):
        held = parameters()
        adam = make_optimizer(held, lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
        for number, ids in enumerate(batches):
            step(*held, ids, is_sparse=is_sparse)
            if number % 2:  # two rows of data in one step
                step(*held, ids.flip(0)[:4], is_sparse=is_sparse)
            torch._foreach_mul_(gradients_of(held), 0.5)
            apply_gradients(adam, 0.1 / (1 + number))
        runs.append((held, adam.state_dict()["state"]))
    (dense, dense_state), (sparse, sparse_state) = runs
    assert all(torch.equal(one, other) for one, other in zip(dense, sparse, strict=True))
    for index, state in dense_state.items():
        assert all(torch.equal(state[name], sparse_state[index][name]) for name in state)


def test_the_norm_counts_a_row_that_came_twice_once() -> None:
    dense, sparse = parameters(), parameters()
    ids = torch.tensor([3, 3, 7])
    step(*dense, ids, is_sparse=False)
    step(*sparse, ids, is_sparse=True)
    norms = [torch.nn.utils.get_total_norm(gradients_of(held)) for held in (dense, sparse)]
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    held = parameters()
    assert [g.abs().sum().item() for g in gradients_of(held)] == [0.0, 0.0]

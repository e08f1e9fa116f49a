"""The training pattern's attention against a plain dense softmax, in value, gradient and memory."""

import pytest
import torch

from specctl.core.attention import attend_cached, bind, bind_flex
from specctl.core.attentionplan import Plan, plan_attention

H, J, E = 4, 2, 8


def pattern(num_docs: int = 3, length: int = 7, depth: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements (anchor, depth) of whole chains with holes between them, and the first key of each document."""
    starts = torch.arange(num_docs).repeat_interleave(length) * length
    pairs = [(a, d) for a in range(num_docs * length) for d in range(1, depth + 1) if (a * 7) % 5 >= d]
    anchors, depths = torch.tensor(pairs).T
    return anchors, depths, starts


def dense(q, core, own, plan: Plan, window: int | None = None) -> torch.Tensor:
    """The same by one dense masked softmax; rows that see nothing are zero."""
    keys, values = (torch.cat(pair).repeat_interleave(H // J, 1) for pair in zip(core, own, strict=True))
    n = core[0].shape[0]
    key_anchor = torch.cat((torch.arange(n), plan.own_anchors_M))
    key_depth = torch.cat((torch.zeros(n, dtype=torch.int64), plan.own_depths_M))
    a, d, s = plan.anchors_Q[:, None], plan.depths_Q[:, None], plan.starts_Q[:, None]
    seen = (key_depth == 0) & (key_anchor <= a) & (key_anchor >= s)
    seen |= (key_depth > 0) & (key_anchor == a) & (key_depth <= d)
    if window is not None:
        seen &= a + d - key_anchor - key_depth < window
    scores = torch.einsum("qhe,khe->hqk", q, keys) * E**-0.5
    share = torch.softmax(scores.masked_fill(~seen, -1e30), -1) * seen
    return torch.einsum("hqk,khe->qhe", share, values)


def inputs(plan: Plan, num_core: int, dtype=torch.float64) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = (
        (len(plan.anchors_Q), H),
        (num_core, J),
        (num_core, J),
        (len(plan.own_anchors_M), J),
        (len(plan.own_anchors_M), J),
    )
    return [torch.randn(n, h, E, generator=draw).to(dtype).requires_grad_() for n, h in sizes]


def run(
    plan: Plan, tensors: list[torch.Tensor], window: int | None, function
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    q, k, v, own_k, own_v = tensors
    out = (
        bind(plan, window)(q, (k, v), (own_k, own_v))
        if function is bind
        else dense(q, (k, v), (own_k, own_v), plan, window)
    )
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, list(torch.autograd.grad((out * weight).sum(), tensors))


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_output_and_gradients_equal_a_dense_softmax(window: int | None, dtype: torch.dtype) -> None:
    anchors, depths, starts = pattern()
    plan = plan_attention(anchors, depths, starts_N=starts, own=(anchors, depths))
    tensors, tolerance = inputs(plan, len(starts), dtype), 1e-12 if dtype == torch.float64 else 1e-5
    out, grads = run(plan, tensors, window, bind)
    expected, expected_grads = run(plan, tensors, window, dense)
    assert torch.allclose(out, expected, atol=tolerance)
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert torch.allclose(found, wanted, atol=tolerance)


def test_bfloat16_is_near_float32() -> None:
    anchors, depths, starts = pattern()
    plan = plan_attention(anchors, depths, starts_N=starts, own=(anchors, depths))
    half = [x.detach().bfloat16().requires_grad_() for x in inputs(plan, len(starts))]
    out, grads = run(plan, half, None, bind)
    expected, expected_grads = run(plan, [x.detach().float().requires_grad_() for x in half], None, dense)
    assert torch.allclose(out.float(), expected, atol=2e-2)
    assert out.dtype == grads[0].dtype == torch.bfloat16
    for found, wanted in zip(grads, expected_grads, strict=True):
        assert float((found.float() - wanted).abs().max()) < 2e-2 * float(wanted.abs().max())


@pytest.mark.parametrize("num_queries", ["all", "some"])
def test_depth_zero_is_causal_within_each_document(num_queries: str) -> None:
    starts = torch.arange(3).repeat_interleave(300) * 300
    rows = torch.arange(900) if num_queries == "all" else (torch.arange(900) % 300 > 170).nonzero()[:, 0]
    plan = plan_attention(rows, torch.zeros_like(rows), starts_N=starts)
    assert all(run.is_causal for run in plan.runs) == (num_queries == "all")
    q, k, v, *_ = inputs(plan, 900)
    out = bind(plan, None)(q, (k, v), None)
    assert torch.allclose(out, dense(q, (k, v), (k[:0], v[:0]), plan), atol=1e-12)


def test_an_element_that_sees_nothing_gives_zeros_and_finite_gradients() -> None:
    """A softmax over no key is NaN, and one NaN row spreads to every gradient (vllm-project/speculators#691)."""
    starts = torch.tensor([0, 0, 4, 4, 4, 4])
    rows = torch.tensor([1, 2, 3, 4])  # the keys of 2's and 3's document begin at 4, after them
    plan = plan_attention(rows, torch.zeros_like(rows), starts_N=starts)
    tensors = inputs(plan, 6)
    out, grads = run(plan, tensors, None, bind)
    assert not out[1:3].any()
    assert out[0].any()
    assert out[3].any()
    assert all(bool(g.isfinite().all()) for g in grads)
    assert not grads[0][1:3].any()


def test_no_element_at_all_is_fine() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    plan = plan_attention(none, none, starts_N=torch.zeros(4, dtype=torch.int64))
    out, grads = run(plan, inputs(plan, 4), None, bind)
    assert out.shape == (0, H, E)
    assert not any(g.any() for g in grads)


def test_a_chain_with_a_hole_is_noticed() -> None:
    anchors, depths = torch.tensor([0, 1]), torch.tensor([1, 2])
    with pytest.raises(AssertionError, match="hole"):
        plan_attention(anchors, depths, starts_N=torch.zeros(4, dtype=torch.int64), own=(anchors, depths))


@pytest.mark.parametrize("window", [None, 3])
def test_decoding_over_a_cache_equals_one_causal_forward(window: int | None) -> None:
    rows = torch.arange(9)
    plan = plan_attention(rows, torch.zeros_like(rows), starts_N=torch.zeros_like(rows))
    q, k, v, *_ = inputs(plan, 9)
    whole = bind(plan, window)(q, (k, v), None)
    assert torch.allclose(attend_cached(q[6:], k, v, window), whole[6:], atol=1e-12)


@pytest.mark.parametrize(("depth", "window"), [(1, None), (0, None), (0, 300)])
def test_memory_grows_with_the_queries_not_with_their_square(depth: int, window: int | None) -> None:
    """The largest tensor made, forward and backward, for 2,500 and for 5,000 queries of one document."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            made = out if isinstance(out, (tuple, list)) else (out,)
            self.size = max([self.size, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
            return out

    def largest(count: int) -> int:
        slots = torch.arange(count)
        elements = (slots, torch.full_like(slots, depth))
        plan = plan_attention(*elements, starts_N=torch.zeros_like(slots), own=elements if depth else None)
        with Largest() as mode:
            run(plan, inputs(plan, count, torch.float32), window, bind)
        return mode.size

    assert largest(5000) <= 2.1 * largest(2500)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_flex_sees_what_the_exact_path_sees(window) -> None:
    """Its forward runs on the CPU too; its gradients are compared where there is a GPU."""
    anchors, depths, starts = pattern()
    plan = plan_attention(anchors, depths, starts_N=starts, own=(anchors, depths))
    q, k, v, own_k, own_v = (tensor.detach() for tensor in inputs(plan, len(starts), torch.float32))
    exact = bind(plan, window)(q, (k, v), (own_k, own_v))
    flex = bind_flex(plan, window)(q, (k, v), (own_k, own_v))
    torch.testing.assert_close(flex, exact, rtol=1e-5, atol=1e-6)

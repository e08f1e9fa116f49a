"""Products in fp32: oneDNN where it is taken, the same numbers wherever it is not."""

import pytest
import torch
from torch import nn

from specctl.core.products import is_for_onednn, multiply, quick_linears

M, K, N = 256, 512, 4096


def pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """[M, K] and [K, N]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(M, K, generator=generator).to(dtype), torch.randn(K, N, generator=generator).to(dtype)


def assert_close(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`found` is a @ b but for rounding in fp32."""
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)


def test_large_fp32_products_are_right_in_both_layouts() -> None:
    a, b = pair()
    for right in (b, b.T.contiguous().T):
        assert is_for_onednn(a, right) == hasattr(torch.ops.mkldnn, "_linear_pointwise")
        assert_close(multiply(a, right), a, b)


def test_the_same_product_gives_the_same_bits() -> None:
    a, b = pair()
    assert torch.equal(multiply(a, b), multiply(a.clone(), b.clone()))


def test_tensors_with_gaps_are_multiplied_by_torch() -> None:
    a, b = pair()
    wide_a, wide_b = torch.cat((a, a), 1)[:, :K], torch.cat((b, b), 1)[:, :N]
    for left, right in ((wide_a, b), (a, wide_b), (a.T.contiguous().T, b)):
        assert not is_for_onednn(left, right)
        assert_close(multiply(left, right), a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_multiplied_by_torch(dtype: torch.dtype) -> None:
    a, b = pair(dtype)
    assert not is_for_onednn(a, b)
    assert torch.equal(multiply(a, b), a @ b)


def test_small_products_are_multiplied_by_torch() -> None:
    a, b = pair()
    assert not is_for_onednn(a[:8], b)
    assert torch.equal(multiply(a[:8], b), a[:8] @ b)


def test_a_product_that_records_a_gradient_keeps_it() -> None:
    a, b = pair()
    a.requires_grad_()
    assert not is_for_onednn(a, b)
    multiply(a, b).sum().backward()
    torch.testing.assert_close(a.grad, b.sum(1).expand(M, K), rtol=1e-4, atol=1e-3)


def test_autocast_still_casts() -> None:
    a, b = pair()
    with torch.autocast("cpu", torch.bfloat16):
        assert multiply(a, b).dtype == torch.bfloat16


def taken(*layers: nn.Module) -> list[bool]:
    """Whether each layer is computed by oneDNN now."""
    return ["forward" in vars(layer) for layer in layers]


@pytest.mark.parametrize("shape", [(1, K), (2, 3, K), (0, K), (40, K)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quick_linear_layer_gives_what_it_gave_before_and_is_put_back(shape: tuple[int, ...], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer, x = nn.Linear(K, 1024, bias=bias), torch.randn(shape, generator=generator)
    before = layer(x)
    with torch.inference_mode(), quick_linears(layer):
        assert taken(layer) == [hasattr(torch.ops.mkldnn, "_linear_pointwise")]
        torch.testing.assert_close(layer(x), before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer(torch.cat((x, x), -1)[..., :K]), before, rtol=1e-4, atol=1e-5)
    assert taken(layer) == [False]
    assert torch.equal(layer(x), before)


def test_linear_layers_are_put_back_when_decoding_fails() -> None:
    layer = nn.Linear(K, 1024)
    with pytest.raises(KeyError), quick_linears(layer):
        raise KeyError
    assert taken(layer) == [False]


def test_only_large_plain_fp32_linear_layers_become_quick() -> None:
    class Other(nn.Linear):
        """A subclass may compute anything, such as a quantised one."""

    shard = nn.Linear(K, 1024)
    vars(shard)["forward"] = lambda x: x
    gaps = nn.Linear(K, 1024)
    gaps.weight = nn.Parameter(torch.randn(K, 1024).T)
    left = [nn.Linear(16, 16), nn.Linear(K, 1024).bfloat16(), Other(K, 1024), nn.Embedding(1024, K), gaps]
    with quick_linears(nn.ModuleList([*left, shard])):
        assert not any(taken(*left))
        assert shard(3) == 3
    assert shard(3) == 3
    with quick_linears(None):
        pass


def test_a_quick_linear_layer_still_records_gradients_and_casts() -> None:
    layer = nn.Linear(K, 1024)
    x = torch.randn(2, K, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with quick_linears(layer):
        layer(x).sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x.detach().double().float()).dtype == torch.float32
    torch.testing.assert_close(x.grad, layer.weight.detach().sum(0).expand(2, K), rtol=1e-4, atol=1e-4)

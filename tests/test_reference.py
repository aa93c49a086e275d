import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    _mxfp8_e4m3_quantize_torch as vllm_quantize,
)

from vllm_rocm_mxfp8 import layout, reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def assert_like_vllm(x: torch.Tensor) -> None:
    x_q, scale = reference.quantize(x)
    want_q, want_scale = vllm_quantize(x)
    assert scale.shape == want_scale.shape
    different = (scale != want_scale).nonzero()
    assert not len(different), f"first different scale at {different[0].tolist()}"
    assert same_bytes(x_q, want_q)


def random_values(m: int, k: int, dtype: torch.dtype, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    return (
        x
        * torch.exp2(torch.randn(m, k // 32, generator=generator) * spread).repeat_interleave(
            32, dim=1
        )
    ).to(dtype)


@settings(deadline=None, max_examples=60)
@given(
    m=st.integers(1, 9),  # vLLM's own cannot reshape an empty tensor
    blocks=st.integers(1, 6),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([0.0, 3.0, 30.0]),
    seed=st.integers(0, 10_000),
)
def test_quantize_is_byte_equal_to_vllm(m, blocks, dtype, spread, seed):
    assert_like_vllm(random_values(m, blocks * 32, dtype, spread, seed))


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_maximum_exactly_at_and_one_step_above_448_times_a_power_of_two(dtype):
    exact = 448.0 * torch.exp2(torch.arange(-20.0, 7.0))
    above = torch.nextafter(exact.to(dtype), torch.tensor(math.inf, dtype=dtype))
    for maximum, step in ((exact.to(dtype), 0), (above, 1)):
        keep = maximum.isfinite()
        x = torch.zeros(int(keep.sum()), 32, dtype=dtype)
        x[:, 5] = -maximum[keep]
        assert_like_vllm(x)
        if dtype is not torch.float32:
            # In float32 one step is lost in the logarithm, in vLLM's quantizer as here.
            expected = torch.arange(-20, 7)[keep] + 127 + step
            assert reference.quantize(x)[1][:, 0].tolist() == expected.tolist()


def test_special_blocks():
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 32:64] = 0
    x[1, 32:64] = 1e-40
    x[2, 40] = math.nan
    x[3, 40] = math.inf
    x[4, 40] = -math.inf
    x[5, 40] = torch.finfo(torch.bfloat16).max
    x[6, 32:64] = -0.0
    assert_like_vllm(x)
    x_q, scale = reference.quantize(x)
    values = x_q.float()
    assert (values[0, 32:64] == 0).all()
    assert (values[6, 32:64] == 0).all()
    assert values[2, 40].isnan()
    assert values[3, 40].isnan() or values[3, 40] == 448
    assert values[[0, 1, 5, 6, 7]].isfinite().all()
    # No other block is touched.
    clean = torch.randn(8, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    clean_q, clean_scale = reference.quantize(clean)
    for block in (0, 2):
        columns = slice(32 * block, 32 * block + 32)
        assert same_bytes(x_q[:, columns].contiguous(), clean_q[:, columns].contiguous())
        assert torch.equal(scale[:, block], clean_scale[:, block])


def test_zeros_stay_zero_where_denormals_are_flushed():
    x = torch.zeros(2, 64).bfloat16()
    x[0, :32] = 3
    want = reference.quantize(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        got = reference.quantize(x)
    finally:
        torch.set_flush_denormal(False)
    assert same_bytes(got[0], want[0])
    assert (got[0].float()[1] == 0).all()


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 2, 2, 32), (64,), (0, 32), (3, 0, 32)])
def test_quantize_keeps_leading_dimensions(shape):
    x = torch.randn(shape).bfloat16()
    x_q, scale = reference.quantize(x)
    assert x_q.shape == x.shape
    assert scale.shape == (*shape[:-1], shape[-1] // 32)
    flat_q, flat_scale = reference.quantize(x.reshape(-1, shape[-1]))
    assert same_bytes(x_q.reshape(flat_q.shape), flat_q)
    assert torch.equal(scale.reshape(flat_scale.shape), flat_scale)


def test_quantize_of_strided_rows():
    x = torch.randn(6, 128).bfloat16()
    for strided in (x[:, 32:96], x[::2], x.t().contiguous().t()):
        assert same_bytes(
            reference.quantize(strided)[0], reference.quantize(strided.contiguous())[0]
        )


def test_quantize_refuses_partial_blocks():
    with pytest.raises(ValueError, match="K=48"):
        reference.quantize(torch.zeros(2, 48))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_e8m0_byte(dtype):
    values = reference.e8m0_to_float(torch.arange(256, dtype=torch.uint8), dtype)
    assert values.dtype == dtype
    for byte in range(255):
        assert values[byte].item() == math.ldexp(1.0, byte - 127), byte
    assert values[255].isnan()
    as_e8m0 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(reference.e8m0_to_float(as_e8m0, dtype)[:255], values[:255])


@pytest.mark.parametrize("byte", [0, 1, 127, 254])
def test_dequantize_extreme_scales_exactly(byte):
    data = torch.tensor([448.0, -448.0, 2.0**-9, 0.0] * 8).view(1, 32).to(torch.float8_e4m3fn)
    got = reference.dequantize(data, torch.full((1, 1), byte, dtype=torch.uint8))
    want = data.double() * math.ldexp(1.0, byte - 127)
    assert torch.equal(got, want)
    assert got.isfinite().all()


def mxfp8(rows: int, k: int, block: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(rows, k, generator=generator).mul(20).to(torch.float8_e4m3fn)
    scale = torch.randint(
        118, 136, (rows // block, k // 32), dtype=torch.uint8, generator=generator
    )
    return data, scale


def plain_gemm(x_q, x_scale, w_q, w_scale):
    """The definition, element by element in float64, independent of the package."""
    n, k = w_q.shape
    row = torch.arange(n) // (n // w_scale.shape[0])
    w = w_q.double() * torch.pow(2.0, w_scale.double() - 127)[row][:, torch.arange(k) // 32]
    x = x_q.double() * torch.pow(2.0, x_scale.double() - 127)[:, torch.arange(k) // 32]
    return torch.einsum("mk,nk->mn", x, w)


@pytest.mark.parametrize("block", [1, 32])
@pytest.mark.parametrize("preshuffled", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 32), (7, 96, 160), (33, 4128, 64)])
def test_gemm_against_the_definition(block, preshuffled, shape):
    m, n, k = shape
    x_q, x_scale = mxfp8(m, k, 1, seed=1)
    w_q, w_scale = mxfp8(n, k, block, seed=2)
    weight = layout.shuffle(w_q) if preshuffled else w_q
    got = reference.gemm(x_q, x_scale, weight, w_scale)
    want = plain_gemm(x_q, x_scale, w_q, w_scale).bfloat16()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want), f"M={m} N={n} K={k} block={block}"


@pytest.mark.parametrize("preshuffled", [False, True])
def test_gemm_nan_scales_touch_only_their_rows_and_columns(preshuffled):
    x_q, x_scale = mxfp8(8, 64, 1, seed=1)
    w_q, w_scale = mxfp8(64, 64, 32, seed=2)
    clean = reference.gemm(x_q, x_scale, w_q, w_scale)
    x_scale[3, 1] = 255
    w_scale[1, 0] = 255
    weight = layout.shuffle(w_q) if preshuffled else w_q
    got = reference.gemm(x_q, x_scale, weight, w_scale)
    bad = torch.zeros(8, 64, dtype=torch.bool)
    bad[3] = True
    bad[:, 32:] = True
    assert torch.equal(got.isnan(), bad)
    assert torch.equal(got[~bad], clean[~bad])


def test_gemm_zero_scale_bytes_are_tiny_not_nan():
    """V4.1 pads shared-expert scales with zero bytes over zero weights."""
    x_q, x_scale = mxfp8(4, 64, 1, seed=1)
    w_q, w_scale = mxfp8(64, 64, 32, seed=2)
    w_q.view(torch.uint8)[32:] = 0
    w_scale[1] = 0
    got = reference.gemm(x_q, x_scale, w_q, w_scale)
    assert got.isfinite().all()
    assert (got[:, 32:] == 0).all()


def test_gemm_large_scales_do_not_overflow_midway():
    """2^127 * 2^-127: the product is ordinary, an intermediate in float32 is not."""
    x_q = torch.full((1, 32), 448.0).to(torch.float8_e4m3fn)
    w_q = torch.full((16, 32), 448.0).to(torch.float8_e4m3fn)
    got = reference.gemm(
        x_q,
        torch.full((1, 1), 254, dtype=torch.uint8),
        w_q,
        torch.full((16, 1), 0, dtype=torch.uint8),
        torch.float32,
    )
    assert torch.equal(got, torch.full((1, 16), 448.0 * 448 * 32))


def test_gemm_without_rows_and_with_a_wrong_k():
    w_q, w_scale = mxfp8(64, 64, 32, seed=2)
    empty = torch.empty(0, 64, dtype=torch.float8_e4m3fn)
    got = reference.gemm(empty, torch.empty(0, 2, dtype=torch.uint8), w_q, w_scale)
    assert got.shape == (0, 64)
    with pytest.raises(ValueError, match=r"K=32.*K=64"):
        reference.gemm(empty[:, :32], torch.empty(0, 1, dtype=torch.uint8), w_q, w_scale)


def test_linear_quantizes_the_activation():
    w_q, w_scale = mxfp8(64, 64, 1, seed=2)
    x = torch.randn(5, 64).bfloat16() * 1.01
    want = plain_gemm(*vllm_quantize(x), w_q, w_scale).bfloat16()
    assert torch.equal(reference.linear(x, w_q, w_scale), want)
    full_precision = (x.double() @ reference.dequantize(w_q, w_scale).T).bfloat16()
    assert not torch.equal(want, full_precision)

"""The AITER double against the contract page: if the double drifts, every test that runs
the plugin on it proves nothing. Section numbers are those of the page."""

import importlib

import pytest
import torch
from doubles import aiter_double, aiter_numerics, aiter_table
from doubles.aiter_cases import E8M0, error, formula, problem, run
from doubles.aiter_spec import GEMM


@pytest.fixture
def aiter():
    with aiter_double.install(supports_1x32=True) as handle:
        yield handle


# --- numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("w_rows", [32, 1])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 32, 64), (7, 96, 192), (33, 1152, 640), (192, 512, 576), (5, 64, 320)]
)
def test_numbers(aiter, m, n, k, w_rows):
    tensors = problem(m, n, k, w_rows)
    y = run(*tensors)
    assert y.dtype == torch.bfloat16
    assert error(y, formula(*tensors)) < 1e-3
    (call,) = aiter.calls
    assert (call.m, call.n, call.k, call.path, call.launched) == (m, n, k, "bmm", True)
    assert call.w_scale_block == f"{w_rows}x32"
    assert call.kernel == aiter_table.pick_kernel(m, n, k, w_n=w_rows)
    assert not call.tuned


def test_chunks_over_n_agree(aiter, monkeypatch):
    tensors = problem(9, 416, 128)
    whole = run(*tensors)
    monkeypatch.setattr(aiter_numerics, "_CHUNK_ELEMENTS", 1)
    assert torch.equal(run(*tensors), whole)


def test_scale_bytes_at_the_ends(aiter):
    """0 is 2^-127, 254 is 2^127, 255 is NaN and stays in its row or 32 columns."""
    xq, wq, x_scale, w_scale = problem(4, 64, 128)
    x_scale[0], x_scale[1], x_scale[2, 1] = 0, 254, 255
    w_scale[0], w_scale[1] = 254, 0
    y = run(xq, wq, x_scale, w_scale)
    truth = formula(xq, wq, x_scale.clamp(max=254), w_scale).float().bfloat16()
    assert y[2].isnan().all()
    rows = [0, 1, 3]
    assert torch.equal(y[rows], truth[rows])
    assert y[1, :32].isinf().all()
    assert y[0, :32].isfinite().all()
    assert y[0, :32].any()

    w_scale[1, 0], x_scale[2, 1] = 255, 127
    y = run(xq, wq, x_scale, w_scale)
    assert y[:, 32:].isnan().all()
    assert not y[:, :32].isnan().any()


def test_128_blocks_read_a_column_major_activation_scale(aiter):
    """An x_scale of K/128 columns is taken as column-major bytes (1.2)."""
    rng = torch.Generator().manual_seed(3)
    xq, wq, *_ = problem(6, 256, 512)
    by_row = torch.randint(118, 136, (6, 4), generator=rng, dtype=torch.uint8)
    w_scale = torch.randint(118, 136, (2, 4), generator=rng, dtype=torch.uint8)
    y = run(xq, wq, by_row.t().contiguous().view(6, 4), w_scale)
    fine = (by_row.repeat_interleave(4, 1), w_scale.repeat_interleave(4, 1))
    assert error(y, formula(xq, wq, *fine)) < 1e-3


def test_out_is_returned_and_empty_input_launches_nothing(aiter):
    tensors = problem(3, 64, 128)
    out = torch.empty(3, 64, dtype=torch.bfloat16)
    assert run(*tensors, out=out) is out
    assert torch.equal(out, run(*tensors))
    aiter.clear()
    assert run(*problem(0, 64, 128)).shape == (0, 64)
    assert (len(aiter.calls), aiter.launches) == (1, [])


@pytest.mark.parametrize("fault", ["swapped_scale", "unshuffled"])
@pytest.mark.parametrize("shape", [(1, 64, 128), (33, 1152, 640), (7, 128, 128)])
def test_faults_are_far_off(fault, shape):
    tensors = problem(*shape, low=124, high=130)
    with aiter_double.install(fault=fault):
        assert error(run(*tensors), formula(*tensors)) > 0.1


def test_old_aiter_widens_and_is_wrong():
    tensors = problem(5, 256, 256)
    with aiter_double.install("old") as aiter:
        assert error(run(*tensors), formula(*tensors)) > 0.1
        ops = importlib.import_module("aiter.ops.gemm_op_a8w8")
        assert not hasattr(ops, "get_mxscale_bpreshuffle_config")
        assert hasattr(ops, GEMM)
        assert [call.path for call in aiter.calls] == ["widened"]


# --- routing and refusals -----------------------------------------------------------------


def test_uint8_scales_miss_the_e8m0_route(aiter):
    xq, wq, x_scale, w_scale = problem(2, 64, 128)
    ops = importlib.import_module("aiter.ops.gemm_op_a8w8")
    weight = aiter_numerics.shuffle(wq)
    for scales in ((x_scale, w_scale), (x_scale.view(E8M0), w_scale)):
        with pytest.raises(aiter_double.SilentlyWrong, match="not float8_e8m0fnu"):
            ops.gemm_a8w8_blockscale_bpreshuffle(xq, weight, *scales)
    assert [call.path for call in aiter.calls] == ["fp32", "fp32"]
    y = ops.gemm_a8w8_blockscale(xq, weight, x_scale, w_scale, isBpreshuffled=True)
    assert torch.equal(y, run(xq, wq, x_scale, w_scale))


def test_flat_scales_take_the_other_layout(aiter):
    for n, kind, text in (
        (128, aiter_double.SilentlyWrong, "mxpsh layout"),
        (64, RuntimeError, "no legal gfx950 MX tile"),
    ):
        xq, wq, x_scale, w_scale = problem(2, n, 128)
        with pytest.raises(kind, match=text):
            run(xq, wq, x_scale.flatten(), w_scale.flatten())
    assert {call.path for call in aiter.calls} == {"mxpsh"}
    assert aiter.launches == []


@pytest.mark.parametrize(
    ("n", "k", "w_rows"),
    [(5120, 288, 32), (64, 96, 32), (64, 32, 1), (16, 128, 1), (48, 128, 1)],
)
def test_shapes_no_kernel_can_run(aiter, n, k, w_rows):
    with pytest.raises(ValueError, match="no bmm kernel config"):
        run(*problem(2, n, k, w_rows))
    assert aiter.launches == []


def test_ceil_scale_rows_are_no_block(aiter):
    xq, wq, x_scale, _ = problem(2, 48, 128)
    with pytest.raises(ValueError, match="has no block"):
        run(xq, wq, x_scale, torch.full((2, 4), 127, dtype=torch.uint8))


def _strided(t):
    return torch.empty(t.shape[0], 2 * t.shape[1], dtype=t.dtype)[:, ::2].copy_(t)


def test_arguments_the_kernel_refuses(aiter):
    xq, wq, xs, ws = problem(4, 64, 128)
    importlib.import_module("aiter")
    weight = aiter_numerics.shuffle(wq)
    xs, ws = xs.view(E8M0), ws.view(E8M0)
    op = getattr(torch.ops.aiter, GEMM)
    bf16 = torch.bfloat16
    shifted = torch.empty(4, 128, dtype=bf16)[:, ::2]

    wide = torch.empty(4, 8, dtype=torch.uint8)[:, :4].copy_(xs.view(torch.uint8)).view(E8M0)
    turned = ws.view(torch.uint8).t().contiguous().t().view(E8M0)
    for kind, text, call in (
        (RuntimeError, "Out must be bf16", lambda: op(xq, weight, xs, ws, torch.float16)),
        (AssertionError, "dtype", lambda: op(xq, weight, xs, ws, torch.float32)),
        (AssertionError, "out", lambda: op(xq, weight, xs, ws, out=xq.new_empty(4, 63))),
        (AssertionError, "out", lambda: op(xq, weight, xs, ws, out=torch.empty(4, 64))),
        (RuntimeError, "XQ/WQ/Out must be", lambda: op(xq, weight, xs, ws, out=shifted)),
        (RuntimeError, "XQ/WQ/Out must be", lambda: op(_strided(xq), weight, xs, ws)),
        (RuntimeError, "XQ/WQ/Out must be", lambda: op(xq, _strided(weight), xs, ws)),
        (RuntimeError, "x_scale must be contiguous", lambda: op(xq, weight, wide, ws)),
        (RuntimeError, "w_scale must be contiguous", lambda: op(xq, weight, xs, turned)),
        (RuntimeError, "x_scale shape", lambda: op(xq, weight, xs[:3], ws)),
        (RuntimeError, "element_size", lambda: op(xq.to(bf16), weight, xs, ws)),
        (ValueError, "has no block", lambda: op(xq, weight.view(4, 4, 512), xs, ws)),
    ):
        with pytest.raises(kind, match=text):
            call()
    assert aiter.launches == []
    assert all(call.error for call in aiter.calls)
    assert op(xq.view(torch.uint8), weight, xs, ws).isfinite().all()


@pytest.mark.parametrize(
    ("generation", "supports", "probe", "kind", "text"),
    [
        ("v1", False, False, NotImplementedError, "reads a 1x32 w_scale with a row-major"),
        ("v2", False, False, NotImplementedError, "reads a 1x32 w_scale with a row-major"),
        ("v2", "probe_only", True, RuntimeError, r"not a \(32,128\) block"),
        ("v2", True, True, None, ""),
    ],
)
def test_one_row_scales(generation, supports, probe, kind, text):
    tensors = problem(3, 64, 128, w_rows=1)
    with aiter_double.install(generation, supports_1x32=supports) as aiter:
        module = importlib.import_module("aiter.ops.flydsl.batched_gemm_a8w8")
        assert module.bmm_a8w8_mxfp8_supported("1x32", False) is probe
        assert module.bmm_a8w8_mxfp8_supported("32x32", False)
        assert not module.bmm_a8w8_mxfp8_supported("32x32", True)
        if kind is None:
            run(*tensors)
        else:
            with pytest.raises(kind, match=text):
                run(*tensors)
        assert bool(aiter.launches) is (kind is None)


def test_row_major_fallback_takes_any_n_and_output(aiter):
    xq, wq, x_scale, _ = problem(3, 48, 288)
    w_scale = torch.randint(118, 136, (2, 9), dtype=torch.uint8)
    ops = importlib.import_module("aiter.ops.gemm_op_a8w8")
    y = ops.gemm_a8w8_blockscale(xq, wq, x_scale, w_scale, dtype=torch.float32)
    rows = w_scale.repeat_interleave(32, 0)[:48]
    assert error(y, formula(xq, wq, x_scale, rows)) < 1e-3
    with pytest.raises(AssertionError, match="Expected E8M0 group32 scale shapes"):
        ops.gemm_a8w8_blockscale(xq, wq, x_scale[:, :4], w_scale)


def test_shuffle_weight(aiter):
    shuffle_weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight
    x = torch.arange(32 * 64, dtype=torch.int64).to(torch.uint8).view(32, 64)
    done = shuffle_weight(x)
    assert torch.equal(done, x.view(2, 16, 2, 2, 16).permute(0, 2, 3, 1, 4).reshape(32, 64))
    assert torch.equal(aiter_numerics.unshuffle(done), x)
    assert done.is_shuffled
    assert not hasattr(done.view(-1), "is_shuffled")
    for shape, text in (((24, 64), "24 % 16 == 8"), ((32, 48), "48 % 32 == 16")):
        with pytest.raises(AssertionError, match=text):
            shuffle_weight(torch.zeros(shape, dtype=torch.uint8))

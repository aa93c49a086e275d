"""Random MXFP8 problems, their float64 truth and a correct caller of the double."""

import importlib

import torch

E8M0 = torch.float8_e8m0fnu


def problem(m, n, k, w_rows=32, seed=0, low=118, high=135):
    """(xq, wq, x_scale, w_scale): e4m3 [M,K], [N,K]; uint8 [M,K/32], [N/w_rows,K/32]."""
    rng = torch.Generator().manual_seed(seed)
    data = [torch.randn(rows, k, generator=rng).to(torch.float8_e4m3fn) for rows in (m, n)]
    scales = [
        torch.randint(low, high + 1, (rows, k // 32), generator=rng, dtype=torch.uint8)
        for rows in (m, n // w_rows)
    ]
    return (*data, *scales)


def formula(xq, wq, x_scale, w_scale):
    """sum over k of x 2^(sx-127) w 2^(sw-127), in float64: [M, N]."""
    rows = wq.shape[0] // w_scale.shape[0]
    x = xq.double() * torch.exp2(x_scale.double() - 127).repeat_interleave(32, 1)
    w = wq.double() * torch.exp2(w_scale.double() - 127).repeat_interleave(
        rows, 0
    ).repeat_interleave(32, 1)
    return x @ w.t()


def error(y, expected):
    """Relative Frobenius error against the bf16-rounded truth."""
    truth = expected.to(y.dtype).double()
    return ((y.double() - truth).norm() / truth.norm()).item()


def run(xq, wq, x_scale, w_scale, **options):
    """The call a correct caller makes, from row-major weight and uint8 scales."""
    aiter = importlib.import_module("aiter")
    weight = importlib.import_module("aiter.ops.shuffle").shuffle_weight(wq)
    scales = (x_scale.view(E8M0), w_scale.view(E8M0))
    return aiter.gemm_a8w8_blockscale_bpreshuffle(xq, weight, *scales, **options)

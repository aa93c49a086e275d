import pytest
import torch
from test_reference import mxfp8, plain_gemm
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    _mxfp8_e4m3_quantize_torch as vllm_quantize,
)

from vllm_rocm_mxfp8 import layout
from vllm_rocm_mxfp8.ops import linear as linear_op

N, K = 96, 160


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_MXFP8_BACKEND", "reference")


def layer(block: int, preshuffled: bool):
    data, scale = mxfp8(N, K, block, seed=5)
    return (layout.shuffle(data) if preshuffled else data), scale, data


def call(x, weight, scale, out_dtype=torch.bfloat16, x_scale=None):
    return torch.ops.vllm_rocm_mxfp8.linear(x, x_scale, weight, scale, N, K, out_dtype)


@pytest.mark.parametrize("block", [1, 32])
@pytest.mark.parametrize("preshuffled", [True, False])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3), (2, 1, 3), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_leading_shape_and_dtype(block, preshuffled, shape, dtype):
    weight, scale, data = layer(block, preshuffled)
    x = torch.randn(*shape, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = call(x, weight, scale, dtype)
    want = plain_gemm(*vllm_quantize(x.reshape(-1, K)), data, scale).to(dtype)
    assert got.shape == (*shape, N)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert torch.equal(got.reshape(-1, N), want)


@pytest.mark.parametrize("preshuffled", [True, False])
def test_strided_inputs(preshuffled):
    weight, scale, _ = layer(32, preshuffled)
    wide = torch.randn(4, 2 * K).bfloat16()
    for x in (wide[:, K:], wide[::2, :K], torch.randn(K, 5).bfloat16().T):
        assert torch.equal(call(x, weight, scale), call(x.contiguous(), weight, scale))


@pytest.mark.parametrize("preshuffled", [True, False])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_rows_give_an_empty_result_and_no_launch(monkeypatch, preshuffled, shape):
    weight, scale, _ = layer(32, preshuffled)

    def launched(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(linear_op.reference, "gemm", launched)
    monkeypatch.setattr(linear_op.reference, "quantize", launched)
    monkeypatch.setattr(linear_op, "_row_major", launched)
    got = call(torch.empty(*shape, K, dtype=torch.bfloat16), weight, scale)
    assert got.shape == (*shape, N)
    quantized = torch.empty(*shape, K, dtype=torch.float8_e4m3fn)
    got = call(quantized, weight, scale, x_scale=torch.empty(0, K // 32, dtype=torch.uint8))
    assert got.shape == (*shape, N)
    assert got.dtype == torch.bfloat16


@pytest.mark.parametrize("preshuffled", [True, False])
def test_prequantized_input(preshuffled):
    weight, scale, data = layer(32, preshuffled)
    x_q, x_scale = mxfp8(6, K, 1, seed=9)
    want = plain_gemm(x_q, x_scale, data, scale).bfloat16()
    got = call(x_q.view(2, 3, K), weight, scale, x_scale=x_scale)
    assert got.shape == (2, 3, N)
    if preshuffled:
        assert torch.equal(got.view(6, N), want)
    else:
        # The row-major path quantizes again; the values fit their block exactly.
        assert (got.view(6, N).float() - want.float()).norm() < 0.03 * want.float().norm()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(2, K - 32).bfloat16()}, ValueError, rf"\[\.\.\., {K}\]"),
        ({"x": torch.zeros(2, K, dtype=torch.int8)}, TypeError, "int8"),
        ({"x": torch.zeros(2, K).to(torch.float8_e4m3fn)}, TypeError, "float8_e4m3fn"),
        ({"x_scale": torch.zeros(2, K // 32, dtype=torch.uint8)}, TypeError, "bfloat16"),
        ({"weight": torch.zeros(N, dtype=torch.float8_e4m3fn)}, ValueError, "2 dimensions"),
        (
            {"weight": torch.zeros(N // 16, K // 32, 256).to(torch.float8_e4m3fn)},
            ValueError,
            f"N={N}, K={K}",
        ),
        ({"scale": torch.zeros(N, 1, dtype=torch.uint8)}, ValueError, "scales of"),
        ({"scale": torch.zeros(N, K // 32)}, TypeError, "float32"),
        ({"weight": torch.zeros(N, K, dtype=torch.uint8)}, TypeError, "uint8"),
        (
            {"weight": torch.zeros(N // 16, K // 32, 512, dtype=torch.float8_e5m2)},
            TypeError,
            "float8_e5m2",
        ),
        (
            {"weight": torch.zeros(N + 16, K).to(torch.float8_e4m3fn)},
            ValueError,
            rf"\[{N}, {K}\]",
        ),
    ],
)
def test_bad_operands_are_named(change, error, words):
    weight, scale, _ = layer(32, True)
    arguments = {"x": torch.zeros(2, K).bfloat16(), "weight": weight, "scale": scale}
    with pytest.raises(error, match=words):
        call(**{**arguments, **change})


@pytest.mark.parametrize(
    "x_scale",
    [
        torch.zeros(K // 32, 32, dtype=torch.uint8),  # column-major
        torch.zeros(1, K // 32, dtype=torch.uint8),  # one per 32 rows
        torch.zeros(64, K // 32, dtype=torch.uint8),  # padded
        torch.zeros(32 * K // 32, dtype=torch.uint8),  # flat
        torch.zeros(32, K // 32),  # float32
    ],
)
@pytest.mark.parametrize("preshuffled", [True, False])
def test_scales_of_a_quantized_input_must_be_row_major(x_scale, preshuffled):
    weight, scale, _ = layer(32, preshuffled)
    x_q = torch.zeros(32, K).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=rf"x_scale must be row-major \[32, {K // 32}\]"):
        call(x_q, weight, scale, x_scale=x_scale)


def test_a_file_that_vanishes_after_start_does_not_stop_serving(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_ROCM_MXFP8_TUNING", str(tmp_path / "gone"))
    weight, scale, _ = layer(32, True)
    assert call(torch.ones(2, K).bfloat16(), weight, scale).shape == (2, N)


def test_a_preshuffled_weight_without_a_backend_says_what_happened(monkeypatch):
    weight, scale, _ = layer(32, True)
    monkeypatch.setenv("VLLM_ROCM_MXFP8_BACKEND", "auto")
    with pytest.raises(RuntimeError, match="no backend of this process reads that layout"):
        call(torch.zeros(2, K).bfloat16(), weight, scale)


@pytest.mark.parametrize("preshuffled", [True, False])
def test_opcheck(preshuffled):
    weight, scale, _ = layer(32, preshuffled)
    op = torch.ops.vllm_rocm_mxfp8.linear.default
    for x in (torch.randn(3, K), torch.randn(2, 2, K), torch.empty(0, K)):
        arguments = (x.bfloat16(), None, weight, scale, N, K, torch.bfloat16)
        # The schema check cannot copy float8; the aliasing that it looks for is below.
        torch.library.opcheck(
            op, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic")
        )
        assert not any(
            argument.alias_info is not None and argument.alias_info.is_write
            for argument in op._schema.arguments
        )


class Layer(torch.nn.Module):
    def __init__(self, weight, scale):
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.scale = torch.nn.Parameter(scale, requires_grad=False)

    def forward(self, x):
        return call(x * 2, self.weight, self.scale) + 1


def traced(module, *inputs):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    return compiled, graphs, [compiled(x) for x in inputs]


def test_one_graph_serves_every_m_and_both_layouts():
    """The graph traced on a preshuffled weight is right on a row-major one: it holds the
    one op, whose choice is made at run time."""
    shuffled = Layer(*layer(32, True)[:2])
    plain = Layer(*layer(32, False)[:2])
    inputs = [torch.randn(m, K).bfloat16() for m in (2, 7, 33, 4096)]
    _, graphs, outputs = traced(shuffled, *inputs)
    assert len(graphs) == 1
    for x, out in zip(inputs, outputs, strict=True):
        assert torch.equal(out, shuffled(x))
    targets = {str(n.target) for n in graphs[0].graph.nodes if n.op == "call_function"}
    assert any("vllm_rocm_mxfp8.linear" in t for t in targets), targets
    _, plain_graphs, _ = traced(plain, inputs[0])
    plain_targets = {
        str(n.target) for n in plain_graphs[0].graph.nodes if n.op == "call_function"
    }
    assert plain_targets == targets


def test_inductor_compiles_it_with_symbolic_m():
    module = Layer(*layer(32, True)[:2])
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for m in (2, 5, 130):
        x = torch.randn(m, K).bfloat16()
        assert torch.equal(compiled(x), module(x)), m

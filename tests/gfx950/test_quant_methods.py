"""The quantization methods that reach vLLM's MXFP8 kernel list, each through its own code."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.fusion.quant_activation import get_input_quant_key
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kMxfp8Dynamic,
    kMxfp8Static,
)

import vllm_rocm_mxfp8
from vllm_rocm_mxfp8 import after_load, reference

N, K = 96, 128


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_MXFP8_BACKEND", "reference")
    vllm_rocm_mxfp8.register()
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with set_current_vllm_config(VllmConfig()):
        yield


def copy_loader(param, loaded_weight):
    param.data.copy_(loaded_weight)


class SchemeMethod:
    """What vLLM's wrappers around a scheme do, as far as a linear sees it."""

    def __init__(self, scheme):
        self.scheme = scheme

    def process_weights_after_loading(self, layer):
        self.scheme.process_weights_after_loading(layer)

    def apply(self, layer, x, bias=None):
        return self.scheme.apply_weights(layer, x, bias)


def scheme_layer(scheme, **arguments):
    layer = torch.nn.Module()
    layer.scheme = scheme
    layer.quant_method = SchemeMethod(scheme)
    scheme.create_weights(
        layer=layer, input_size_per_partition=K, output_partition_sizes=[N],
        params_dtype=torch.bfloat16, weight_loader=copy_loader, **arguments,
    )  # fmt: skip
    return layer


def compressed_tensors():
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
        compressed_tensors_w8a8_mxfp8 as module,
    )

    return scheme_layer(module.CompressedTensorsW8A8Mxfp8())


def quark(rows):
    from vllm.model_executor.layers.quantization.quark.schemes.quark_ocp_mx import QuarkOCP_MX

    return scheme_layer(QuarkOCP_MX(kMxfp8Static, kMxfp8Dynamic, scale_block_rows=rows))


def inc():
    from vllm.model_executor.layers.quantization.inc.schemes import inc_mxfp8_linear as module

    return scheme_layer(module.INCMxfp8LinearScheme(), input_size=K, output_size=N)


def modelopt_layer(rows):
    spec, context, fmt = modelopt.resolve("MXFP8", None, "")
    if rows > 1:
        context = modelopt.CkptCtx(scale_block_size=(rows, 32))
    layer = torch.nn.Module()
    layer.quant_method = modelopt.ModelOptLinearMethod(spec, context, fmt)
    layer.quant_method.create_weights(
        layer, K, [N], K, N, torch.bfloat16, weight_loader=copy_loader
    )
    return layer


METHODS = {
    "modelopt 1x32": (lambda: modelopt_layer(1), 1),
    "modelopt 32x32": (lambda: modelopt_layer(32), 32),
    "compressed-tensors": (compressed_tensors, 1),
    "quark 1x32": (lambda: quark(1), 1),
    "quark 32x32": (lambda: quark(32), 32),
    "inc": (inc, 1),
}


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_served_on_preshuffled_weights(method):
    make, rows = METHODS[method]
    layer = make()
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(N, K, generator=generator).mul(20).to(torch.float8_e4m3fn)
    stored = torch.randint(
        118, 136, (N // rows, K // 32), dtype=torch.uint8, generator=generator
    )
    layer.weight.weight_loader(layer.weight, data)
    layer.weight_scale.weight_loader(layer.weight_scale, stored)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.shape == (N // 16, K // 32, 512)
    assert layer.weight_scale.shape == stored.shape
    assert get_input_quant_key(layer) == kMxfp8Dynamic
    x = torch.randn(7, K, generator=generator).bfloat16()
    bias = torch.randn(N, generator=generator).bfloat16()
    want = reference.linear(x, data, stored) + bias
    assert torch.equal(layer.quant_method.apply(layer, x, bias), want)
    rows_found = after_load.compat.mxfp8_linears(torch.nn.ModuleDict({"fc": layer}))
    assert [(name, type(kernel).__name__) for name, _, kernel in rows_found] == [
        ("fc", "AiterMxfp8LinearKernel")
    ]


def test_online_quantization_of_a_bf16_checkpoint(monkeypatch):
    from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel
    from vllm.model_executor.layers.quantization.online import mxfp8 as online
    from vllm.model_executor.layers.quantization.utils import mxfp8_utils

    # The op behind it is registered for GPUs only; its torch form is the same.
    monkeypatch.setattr(online, "mxfp8_e4m3_quantize", mxfp8_utils._mxfp8_e4m3_quantize_torch)
    method = online.Mxfp8OnlineLinearMethod.__new__(online.Mxfp8OnlineLinearMethod)

    # Its own create_weights puts the weight on the meta device for a streaming loader; what
    # matters here is what it hands to the kernel.
    layer = torch.nn.Module()
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    layer.quant_method = method
    method.kernel = init_mxfp8_linear_kernel(weight_shape=layer.weight.shape)
    method.get_weight_for_quantization = lambda layer: layer.weight
    method.release_requantization_source_weights = lambda layer: None
    method.process_weights_after_loading(layer)
    assert layer.weight.shape == (N // 16, K // 32, 512)
    x = torch.randn(5, K).bfloat16()
    want = reference.linear(x, *reference.quantize(weight))
    assert torch.equal(method.apply(layer, x), want)

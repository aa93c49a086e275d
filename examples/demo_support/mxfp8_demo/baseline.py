"""The kernel that the plugin is compared with: nothing of the plugin's, all of vLLM's.

It keeps the row-major weight, dequantizes it with vLLM's own function, sends the
activation through vLLM's own torch quantizer and back, multiplies in float64 and rounds
once. Registered for the CPU through vLLM's public interface.
"""

import torch
from vllm.model_executor.kernels.linear import Mxfp8LinearKernel, register_linear_kernel
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    _mxfp8_e4m3_quantize_torch,
    dequant_mxfp8_to_bf16,
)
from vllm.platforms import PlatformEnum


def baseline_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [..., K], row-major weight [N, K], scale [N, K/32] -> [..., N] in x's dtype."""
    x_q, x_scale = _mxfp8_e4m3_quantize_torch(x.reshape(-1, x.shape[-1]))
    x_bf16 = dequant_mxfp8_to_bf16(x_q, x_scale)
    weight_bf16 = dequant_mxfp8_to_bf16(weight, scale)
    out = (x_bf16.double() @ weight_bf16.double().T).to(x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


# Opaque to the compiler, so that compiled runs round where eager ones do.
opaque_linear = torch.library.custom_op(
    "mxfp8_demo::baseline_linear", baseline_linear, mutates_args=()
)


@opaque_linear.register_fake
def _(x, weight, scale):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class BaselineMxfp8LinearKernel(Mxfp8LinearKernel):
    supports_pre_processed_weights = True

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, c):
        return True, None

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None):
        out = opaque_linear(x, layer.weight, layer.weight_scale)
        return out if bias is None else out + bias


class TracedBaselineMxfp8LinearKernel(BaselineMxfp8LinearKernel):
    """The same, traced into the compiled graph, as vLLM's own kernels are: such a graph
    has the row-major shapes baked in."""

    def apply_weights(self, layer, x, bias=None):
        out = baseline_linear(x, layer.weight, layer.weight_scale)
        return out if bias is None else out + bias


def register(traced: bool) -> None:
    kernel = TracedBaselineMxfp8LinearKernel if traced else BaselineMxfp8LinearKernel
    register_linear_kernel(kernel, PlatformEnum.CPU, "mxfp8")

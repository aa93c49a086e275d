"""The kernel that the plugin is compared with: nothing of the plugin's, all of vLLM's.

It keeps the row-major weight, dequantizes it with vLLM's own function, sends the
activation through vLLM's own torch quantizer and back, multiplies in float64 and rounds
once. Registered for the CPU through vLLM's public interface.
"""

from vllm.model_executor.kernels.linear import Mxfp8LinearKernel, register_linear_kernel
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    _mxfp8_e4m3_quantize_torch,
    dequant_mxfp8_to_bf16,
)
from vllm.platforms import PlatformEnum


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
        x_q, x_scale = _mxfp8_e4m3_quantize_torch(x.reshape(-1, x.shape[-1]))
        x_bf16 = dequant_mxfp8_to_bf16(x_q, x_scale)
        weight = dequant_mxfp8_to_bf16(layer.weight, layer.weight_scale)
        out = (x_bf16.double() @ weight.double().T).to(x.dtype)
        out = out.reshape(*x.shape[:-1], weight.shape[0])
        return out if bias is None else out + bias


def register() -> None:
    register_linear_kernel(BaselineMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")

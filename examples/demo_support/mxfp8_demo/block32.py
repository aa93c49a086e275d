"""A ModelOpt MXFP8 config in which chosen layers store one scale per 32x32 block, as
DeepSeek-V4.1's does for all of its linears.

config.json: ``{"quant_method": "mxfp8_block32", "quant_algo": "MXFP8", "ignore": [...],
"block32": ["mlp"]}``; a linear whose name contains an entry of ``block32`` has blocks.
"""

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import modelopt, register_quantization_config

NAME = "mxfp8_block32"


class Block32Config(modelopt.ModelOptMxFp8Config):
    """MXFP8 with 32x32 blocks where the checkpoint says so, 1x32 elsewhere."""

    block32: tuple = ()

    def get_name(self):
        return NAME

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None):
        return NAME if (hf_quant_cfg or {}).get("quant_method") == NAME else None

    @classmethod
    def from_config(cls, config):
        made = super().from_config({**config, "quant_method": "modelopt"})
        made.block32 = tuple(config.get("block32", ()))
        return made

    def get_quant_method(self, layer, prefix):
        if (
            isinstance(layer, LinearBase)
            and not self.is_layer_excluded(prefix)
            and any(part in prefix for part in self.block32)
        ):
            plain = modelopt.build_linear_method(self, self.quant_method, prefix)
            context = modelopt.CkptCtx(scale_block_size=(32, 32))
            return modelopt.ModelOptLinearMethod(plain.spec, context)
        return super().get_quant_method(layer, prefix)


def register() -> None:
    register_quantization_config(NAME)(Block32Config)

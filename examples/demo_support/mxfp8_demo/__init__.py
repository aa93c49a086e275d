"""A second vLLM plugin, for the demo and the tests only.

Put this file's parent folder on PYTHONPATH and vLLM finds it beside the real plugin. It
gives vLLM a quantization config that declares 32x32 scale blocks for some layers, and,
with ``MXFP8_DEMO_BASELINE=1`` (or ``traced``), the kernel that results are compared with.
"""

import os


def register() -> None:
    from mxfp8_demo import block32

    block32.register()
    kind = os.environ.get("MXFP8_DEMO_BASELINE")
    if kind:
        from mxfp8_demo import baseline

        baseline.register(traced=kind == "traced")
    if os.environ.get("MXFP8_DEMO_FORGET_KEY") == "1":
        forget_compile_key()


def forget_compile_key() -> None:
    """Take the plugin's entries out of vLLM's compile key, to show what they prevent."""
    import vllm.envs

    from vllm_rocm_mxfp8 import envs

    envs.register_with_vllm = lambda: True
    for name in [n for n in vllm.envs.environment_variables if n.startswith(envs.PREFIX)]:
        del vllm.envs.environment_variables[name]

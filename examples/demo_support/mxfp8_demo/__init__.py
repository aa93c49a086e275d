"""A second vLLM plugin, for the demo and the tests only.

Put this file's parent folder on PYTHONPATH and vLLM finds it beside the real plugin. It
gives vLLM a quantization config that declares 32x32 scale blocks for some layers, and,
with ``MXFP8_DEMO_BASELINE=1``, the kernel that results are compared with.
"""

import os


def register() -> None:
    from mxfp8_demo import block32

    block32.register()
    if os.environ.get("MXFP8_DEMO_BASELINE") == "1":
        from mxfp8_demo import baseline

        baseline.register()

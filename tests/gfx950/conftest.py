"""Tests on vLLM's real ROCm platform, simulated for gfx950 without a GPU.

They run only in the subprocess that tests/test_gfx950.py starts: its PYTHONPATH has vLLM
0.33.0 and AITER's double first, and MXFP8_SIMULATED_GFX950=1 is set.
"""

import os
import sys
import types

import pytest

SIMULATED = os.environ.get("MXFP8_SIMULATED_GFX950") == "1"
collect_ignore_glob = [] if SIMULATED else ["test_*.py"]


def simulate_amdsmi(arch: str) -> None:
    """The one library that vLLM asks for the GPU."""
    module = types.ModuleType("amdsmi")

    class AmdSmiError(Exception):
        pass

    class MemoryType:
        VRAM = 0

    module.AmdSmiException, module.AmdSmiMemoryType = AmdSmiError, MemoryType
    module.amdsmi_init = module.amdsmi_shut_down = lambda *a, **k: None
    module.amdsmi_get_processor_handles = lambda: [object()]
    module.amdsmi_get_gpu_asic_info = lambda h: {
        "target_graphics_version": arch,
        "device_id": "0x75a3",
    }
    module.amdsmi_get_gpu_device_uuid = lambda h: "0" * 32
    module.amdsmi_get_gpu_memory_total = lambda h, t: 288 << 30
    module.amdsmi_topo_get_link_type = lambda a, b: {"hops": 1, "type": 2}
    module.amdsmi_topo_get_numa_node_number = lambda h: 0
    sys.modules["amdsmi"] = module


if SIMULATED:
    simulate_amdsmi("gfx950")


@pytest.fixture(autouse=True)
def fresh_probes():
    """Every test meets the machine anew."""
    from vllm_rocm_mxfp8.compat import aiter
    from vllm_rocm_mxfp8.ops import linear

    aiter.probe.cache_clear()
    linear.forget_backend()
    yield
    aiter.probe.cache_clear()
    linear.forget_backend()

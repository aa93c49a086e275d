"""Loading and switching, in fresh processes: what is imported, inserted and said."""

import pytest
from support import run_python

from vllm_rocm_mxfp8 import __version__

CPU_LIST = """
import vllm.model_executor.kernels.linear as kernel_list
from vllm.platforms import PlatformEnum, current_platform
assert current_platform._enum is PlatformEnum.CPU
def names(platform=PlatformEnum.CPU):
    return [k.__name__ for k in kernel_list._POSSIBLE_MXFP8_KERNELS.get(platform, [])]
"""
REFERENCE = {"VLLM_ROCM_MXFP8_BACKEND": "reference"}
HEAVY = ("torch", "vllm", "aiter", "flydsl", "triton", "numpy")


def test_importing_the_package_imports_nothing_heavy():
    run_python(
        f"""
import sys, vllm_rocm_mxfp8
from importlib.metadata import version
assert vllm_rocm_mxfp8.__version__ == version("vllm-rocm-mxfp8")
heavy = [m for m in sys.modules if m.split(".")[0] in {HEAVY}]
assert not heavy, heavy
try:
    vllm_rocm_mxfp8.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise AssertionError
"""
    )


@pytest.mark.parametrize("entry_point", ["register", "arm"])
@pytest.mark.parametrize("env", [{}, REFERENCE, {"VLLM_ROCM_MXFP8": "off"}])
def test_the_entry_points_are_light(entry_point, env):
    """Alone they import nothing of vLLM; inside vLLM's own start not the kernel list."""
    run_python(
        f"""
import sys, vllm_rocm_mxfp8
assert vllm_rocm_mxfp8.{entry_point}() is None
heavy = [m for m in sys.modules if m.split(".")[0] in {HEAVY}]
assert not heavy, heavy
import vllm.plugins
vllm.plugins.load_general_plugins()
for name in ("aiter", "flydsl", "vllm.model_executor.kernels.linear"):
    assert name not in sys.modules, name
import torch
assert not torch.cuda.is_initialized()
assert "VLLM_ROCM_MXFP8_ABI" in sys.modules["vllm.envs"].environment_variables
""",
        VLLM_PLUGINS="rocm_mxfp8",  # the demo's plugin, on the path too, is not light
        **env,
    )


def test_vllm_finds_both_entry_points_under_one_name():
    run_python(
        """
from importlib.metadata import entry_points
for group, value in [("vllm.general_plugins", "vllm_rocm_mxfp8:register"),
                     ("vllm.platform_plugins", "vllm_rocm_mxfp8:arm")]:
    found = [e for e in entry_points(group=group) if e.name == "rocm_mxfp8"]
    assert [e.value for e in found] == [value], (group, found)
"""
    )


@pytest.mark.parametrize("order", ["plugin first", "vllm first"])
def test_reference_creates_the_list_and_three_registrations_are_one(order):
    load = "import vllm_rocm_mxfp8\n" + "vllm_rocm_mxfp8.register()\n" * 3
    code = CPU_LIST + load if order == "vllm first" else load + CPU_LIST
    run_python(
        code
        + """
vllm_rocm_mxfp8.arm()
assert names() == ["AiterMxfp8LinearKernel"], names()
kernel = kernel_list.init_mxfp8_linear_kernel(weight_shape=(64, 96))
assert type(kernel).__name__ == "AiterMxfp8LinearKernel"
from vllm.model_executor.kernels.linear import RocmDotScaledMxfp8LinearKernel
assert isinstance(kernel, RocmDotScaledMxfp8LinearKernel)
assert names(PlatformEnum.ROCM) == ["RocmDotScaledMxfp8LinearKernel", "EmulationMxfp8LinearKernel"]
assert "AiterMxfp8LinearKernel" not in names(PlatformEnum.CUDA)
""",
        **REFERENCE,
    )


def test_registering_inside_the_kernel_lists_own_import():
    """vLLM resolves the platform, hence calls arm(), while its modules load."""
    run_python(
        CPU_LIST
        + """
import json.tool  # any later import lets the waiting callback run
assert names() == ["AiterMxfp8LinearKernel"], names()
""",
        **REFERENCE,
    )


def test_foreign_entries_keep_their_order():
    run_python(
        CPU_LIST
        + """
from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel, register_linear_kernel
class Other(EmulationMxfp8LinearKernel): pass
register_linear_kernel(Other, PlatformEnum.CPU, "mxfp8")
register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")
import vllm_rocm_mxfp8
for _ in range(3):
    vllm_rocm_mxfp8.register()
assert [n for n in names() if n != "AiterMxfp8LinearKernel"] == ["Other", "EmulationMxfp8LinearKernel"]
assert names()[0] == "AiterMxfp8LinearKernel", names()
assert len(names()) == 3
""",
        **REFERENCE,
    )


@pytest.mark.parametrize("env", [{}, {"VLLM_ROCM_MXFP8": "off", **REFERENCE}])
def test_inactive_leaves_vllms_lists_alone(env):
    run_python(
        CPU_LIST
        + """
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
assert PlatformEnum.CPU not in kernel_list._POSSIBLE_MXFP8_KERNELS
everything = [k.__name__ for v in kernel_list._POSSIBLE_MXFP8_KERNELS.values() for k in v]
assert "AiterMxfp8LinearKernel" not in everything
""",
        **env,
    )


def test_vllms_allowlist_switches_the_plugin_off():
    run_python(
        CPU_LIST
        + """
import sys, vllm.plugins
vllm.plugins.load_general_plugins()
assert "vllm_rocm_mxfp8" not in sys.modules
assert names() == []
""",
        VLLM_PLUGINS="rocm-mxfp8",
        **REFERENCE,
    )


def test_vllm_disabled_kernels_is_honoured():
    done = run_python(
        CPU_LIST
        + """
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
try:
    kernel_list.init_mxfp8_linear_kernel(weight_shape=(64, 96))
except ValueError as error:
    print("REFUSED", error)
""",
        VLLM_DISABLED_KERNELS="AiterMxfp8LinearKernel",
        **REFERENCE,
    )
    assert "REFUSED" in done.stdout
    assert "AiterMxfp8LinearKernel disabled by environment variable" in done.stdout


def test_batch_invariance_declines_with_a_reason():
    done = run_python(
        CPU_LIST
        + """
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
try:
    kernel_list.init_mxfp8_linear_kernel(weight_shape=(64, 96))
except ValueError as error:
    print("REFUSED", error)
""",
        VLLM_BATCH_INVARIANT="1",
        **REFERENCE,
    )
    assert "AiterMxfp8LinearKernel: VLLM_BATCH_INVARIANT=1" in done.stdout


@pytest.mark.parametrize("mode", ["off", "auto", "require"])
def test_an_illegal_setting_stops_register_in_any_mode(mode):
    run_python(
        """
import vllm_rocm_mxfp8
try:
    vllm_rocm_mxfp8.register()
except ValueError as error:
    assert "VLLM_ROCM_MXFP8_FUSION='yes'" in str(error) and "0, 1" in str(error), error
else:
    raise AssertionError("accepted")
""",
        VLLM_ROCM_MXFP8=mode,
        VLLM_ROCM_MXFP8_FUSION="yes",
    )


def test_arm_logs_an_illegal_setting_because_vllm_swallows_exceptions_there():
    done = run_python(
        """
import vllm.logger, vllm_rocm_mxfp8
assert vllm_rocm_mxfp8.arm() is None
assert vllm_rocm_mxfp8.arm() is None
""",
        VLLM_ROCM_MXFP8_BACKEND="hipblas",
    )
    assert (done.stdout + done.stderr).count("VLLM_ROCM_MXFP8_BACKEND='hipblas'") == 1


def test_a_mistyped_setting_is_reported_once():
    done = run_python(
        "import vllm.logger, vllm_rocm_mxfp8 as p\np.register(); p.register()",
        VLLM_ROCM_MXFP8_BACKND="reference",
    )
    said = done.stdout + done.stderr
    assert said.count("VLLM_ROCM_MXFP8_BACKND is not a setting") == 1
    assert "did you mean VLLM_ROCM_MXFP8_BACKEND?" in said


def test_fork_after_loading():
    """The plugin may be loaded only in the API server; forked children work on."""
    run_python(
        CPU_LIST
        + """
import os, sys, torch, vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
assert not torch.cuda.is_initialized()
pid = os.fork()
if pid == 0:
    status = 1
    try:
        vllm_rocm_mxfp8.register()
        assert names() == ["AiterMxfp8LinearKernel"], names()
        kernel = kernel_list.init_mxfp8_linear_kernel(weight_shape=(64, 96))
        assert "aiter" not in sys.modules and "flydsl" not in sys.modules
        status = 0
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
        **REFERENCE,
    )


def test_fork_before_the_kernel_list_is_imported():
    run_python(
        """
import os, vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
pid = os.fork()
if pid == 0:
    status = 1
    try:
        from vllm.model_executor.kernels.linear import init_mxfp8_linear_kernel
        kernel = init_mxfp8_linear_kernel(weight_shape=(64, 96))
        status = 0 if type(kernel).__name__ == "AiterMxfp8LinearKernel" else 2
    finally:
        os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
        **REFERENCE,
    )


DRIFTS = {
    "list gone": (
        "del kernel_list._POSSIBLE_MXFP8_KERNELS",
        "_POSSIBLE_MXFP8_KERNELS is missing",
    ),
    "list is a tuple": (
        "kernel_list._POSSIBLE_MXFP8_KERNELS = {PlatformEnum.ROCM: ()}",
        "expected a dict of lists",
    ),
    "backend map gone": (
        "del kernel_list._LINEAR_BACKEND_KERNEL_MAP",
        "_LINEAR_BACKEND_KERNEL_MAP is missing",
    ),
    "parent gone": (
        "del kernel_list.RocmDotScaledMxfp8LinearKernel",
        "RocmDotScaledMxfp8LinearKernel is missing",
    ),
    "apply has another signature": (
        "kernel_list.RocmDotScaledMxfp8LinearKernel.apply_weights = lambda self, layer, x, scale, bias: x",
        "apply_weights takes ('self', 'layer', 'x', 'scale', 'bias')",
    ),
    "apply needs one more": (
        "kernel_list.RocmDotScaledMxfp8LinearKernel.apply_weights = lambda self, layer, x, bias, out: x",
        "apply_weights takes",
    ),
    "apply has an optional parameter more": (
        "kernel_list.RocmDotScaledMxfp8LinearKernel.apply_weights = lambda self, layer, x, bias=None, s=None: x",
        "apply_weights takes",
    ),
    "apply is no function": (
        "kernel_list.RocmDotScaledMxfp8LinearKernel.apply_weights = 5",
        "apply_weights is 5",
    ),
    "config renamed its shape": (
        "kernel_list.Mxfp8LinearLayerConfig = object",
        "expected a dataclass with weight_shape",
    ),
    "replace_parameter cannot be inspected": (
        "import vllm.model_executor.utils as u; u.replace_parameter = dict",
        "ValueError",
    ),
    "replace_parameter changed": (
        "import vllm.model_executor.utils as u; u.replace_parameter = lambda module, name: None",
        "replace_parameter takes (module, name)",
    ),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_a_vllm_that_has_moved_is_left_alone_with_one_warning(drift):
    change, words = DRIFTS[drift]
    done = run_python(
        CPU_LIST
        + f"""
{change}
before = dict(getattr(kernel_list, "_POSSIBLE_MXFP8_KERNELS", {{}}))
import vllm_rocm_mxfp8
for _ in range(3):
    vllm_rocm_mxfp8.register()
assert dict(getattr(kernel_list, "_POSSIBLE_MXFP8_KERNELS", {{}})) == before
""",
        VLLM_PLUGINS="none",
        **REFERENCE,
    )
    said = done.stdout + done.stderr
    assert said.count("[rocm-mxfp8]") == 1, said
    assert words in said
    assert "vllm 0.32.0" in said
    assert f"vllm-rocm-mxfp8 {__version__}" in said


def test_list_entries_of_other_kinds_do_not_disturb():
    run_python(
        CPU_LIST
        + """
import functools
odd = functools.partial(object)
kernel_list._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [odd, "module:Class"]
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
listed = kernel_list._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU]
assert listed[0].__name__ == "AiterMxfp8LinearKernel" and listed[1:] == [odd, "module:Class"]
""",
        VLLM_PLUGINS="none",
        **REFERENCE,
    )


def test_reloading_vllms_modules_installs_again():
    run_python(
        CPU_LIST
        + """
import importlib, vllm.envs, vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
importlib.reload(vllm.envs)
assert "VLLM_ROCM_MXFP8_ABI" in vllm.envs.environment_variables
importlib.reload(kernel_list)
assert names() == ["AiterMxfp8LinearKernel"], names()
# A private copy that never becomes the module is nobody's business.
import importlib.util
spec = importlib.util.find_spec("vllm.envs")
copy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copy)
assert "VLLM_ROCM_MXFP8_ABI" not in copy.environment_variables
""",
        VLLM_PLUGINS="none",
        **REFERENCE,
    )


def test_a_kernel_of_our_name_in_vllm_makes_us_step_aside():
    done = run_python(
        CPU_LIST
        + """
from vllm.model_executor.kernels.linear import EmulationMxfp8LinearKernel
class AiterMxfp8LinearKernel(EmulationMxfp8LinearKernel): pass
kernel_list._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [AiterMxfp8LinearKernel]
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
assert kernel_list._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] == [AiterMxfp8LinearKernel]
""",
        VLLM_PLUGINS="none",
        **REFERENCE,
    )
    assert "ships its own AiterMxfp8LinearKernel" in done.stdout + done.stderr


def test_require_fails_the_load_with_the_words_of_the_warning():
    done = run_python(
        CPU_LIST
        + """
del kernel_list._POSSIBLE_MXFP8_KERNELS
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()          # never raises for this
import types
from vllm_rocm_mxfp8 import after_load
class Worker:
    def load_model(self):
        raise ValueError("Failed to find a kernel that can implement the MXFP8 linear layer.")
after_load.observe(types.SimpleNamespace(Worker=Worker))
try:
    Worker().load_model()
except RuntimeError as error:
    assert "VLLM_ROCM_MXFP8=require" in str(error)
    assert "_POSSIBLE_MXFP8_KERNELS is missing" in str(error)
    assert isinstance(error.__cause__, ValueError)
    print("FAILED AS REQUIRED")
""",
        VLLM_ROCM_MXFP8="require",
        VLLM_PLUGINS="none",
    )
    assert "FAILED AS REQUIRED" in done.stdout


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_worker_without_load_model(mode):
    """Nobody could check the result of loading: `require` refuses to serve."""
    done = run_python(
        CPU_LIST
        + """
import types, vllm_rocm_mxfp8
from vllm_rocm_mxfp8 import after_load
vllm_rocm_mxfp8.register()
after_load.observe(types.SimpleNamespace())
after_load.observe(types.SimpleNamespace())
try:
    kernel_list.init_mxfp8_linear_kernel(weight_shape=(64, 96))
    print("LET GO")
except RuntimeError as error:
    assert "VLLM_ROCM_MXFP8=require" in str(error), error
    assert "Worker.load_model is missing" in str(error), error
    print("STOPPED")
""",
        VLLM_ROCM_MXFP8=mode,
        VLLM_PLUGINS="none",
        **REFERENCE,
    )
    assert ("STOPPED" if mode == "require" else "LET GO") in done.stdout
    assert (done.stdout + done.stderr).count("no report after loading") == 1


def test_observing_twice_wraps_once_and_lets_other_errors_through():
    run_python(
        """
import types
from vllm_rocm_mxfp8 import after_load
class Worker:
    calls = 0
    def load_model(self, *, load_dummy_weights=False):
        Worker.calls += 1
        if load_dummy_weights:
            raise OSError("disk")
        return "result"
module = types.SimpleNamespace(Worker=Worker)
after_load.observe(module)
wrapped = Worker.load_model
after_load.observe(module)
assert Worker.load_model is wrapped
assert Worker().load_model() == "result" and Worker.calls == 1
try:
    Worker().load_model(load_dummy_weights=True)
except OSError as error:
    assert str(error) == "disk"
else:
    raise AssertionError
"""
    )


def test_the_registered_context_manager_leaves_no_trace():
    run_python(
        CPU_LIST
        + """
from vllm_rocm_mxfp8 import registry
lists = {k: list(v) for k, v in kernel_list._POSSIBLE_MXFP8_KERNELS.items()}
backends = {k: set(v) for k, v in kernel_list._LINEAR_BACKEND_KERNEL_MAP.items()}
with registry.registered(kernel_list) as kernel:
    assert names() == ["AiterMxfp8LinearKernel"]
    assert kernel in kernel_list._LINEAR_BACKEND_KERNEL_MAP["aiter"]
assert kernel_list._POSSIBLE_MXFP8_KERNELS == lists
assert kernel_list._LINEAR_BACKEND_KERNEL_MAP == backends
""",
        VLLM_PLUGINS="none",
        **REFERENCE,
    )


def test_the_import_hook_leaves_the_module_as_the_ordinary_loader_would():
    run_python(
        """
import inspect, pickle, sys
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
import vllm.model_executor.kernels.linear as kernel_list
assert type(kernel_list.__loader__).__name__ == "SourceFileLoader"
assert kernel_list.__spec__.loader is kernel_list.__loader__
assert "_POSSIBLE_MXFP8_KERNELS" in inspect.getsource(kernel_list)
""",
        **REFERENCE,
    )

"""The kernel class under vLLM's own quantization method and loaders, on the CPU."""

import copy
import pickle
import types

import pytest
import torch
import vllm.config
import vllm.model_executor.kernels.linear as kernel_list
from support import run_python
from test_reference import plain_gemm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    _mxfp8_e4m3_quantize_torch as vllm_quantize,
)
from vllm.model_executor.model_loader.reload import layerwise

from vllm_rocm_mxfp8 import after_load, layout, registry


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setenv("VLLM_ROCM_MXFP8_BACKEND", "reference")
    # Parameters ask for their tensor-parallel rank; there are no process groups here.
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    with registry.registered(kernel_list) as cls, set_current_vllm_config(VllmConfig()):
        yield cls


def copy_loader(param, loaded_weight):
    """vLLM's reload replays loaders by these argument names."""
    param.data.copy_(loaded_weight)


def make_layer(n, k, block=None, parts=None, bmm=False):
    """A linear with vLLM's real ModelOpt method: created, not yet loaded."""
    layer = torch.nn.Module()
    if bmm:
        layer.bmm_batch_size = 1
        layer.is_bmm = False
    spec, context, fmt = modelopt.resolve("MXFP8", None, "")
    if block:
        context = modelopt.CkptCtx(scale_block_size=(block, 32))
    layer.quant_method = modelopt.ModelOptLinearMethod(spec, context, fmt)
    if bmm:
        # On ROCm vLLM selects for bmm_batch_size only when is_bmm is set; select plainly.
        del layer.bmm_batch_size
    layer.quant_method.create_weights(
        layer, k, parts or [n], k, n, torch.bfloat16, weight_loader=copy_loader
    )
    if bmm:
        layer.bmm_batch_size = 1
    return layer


def load(layer, seed=0, block=1):
    """Fill as vLLM's loader does: scale blocks arrive expanded to rows."""
    generator = torch.Generator().manual_seed(seed)
    n, k = layer.weight.shape
    data = torch.randn(n, k, generator=generator).mul(20).to(torch.float8_e4m3fn)
    rows = -(-n // block)
    scale = torch.randint(118, 136, (rows, k // 32), dtype=torch.uint8, generator=generator)
    scale = scale.repeat_interleave(block, dim=0)[:n]
    layer.weight.data.copy_(data)
    layer.weight_scale.data.copy_(scale)
    return data, scale


def process(layer):
    layer.quant_method.process_weights_after_loading(layer)


def expected(x, data, scale, bias=None):
    out = plain_gemm(*vllm_quantize(x.reshape(-1, x.shape[-1])), data, scale).to(x.dtype)
    out = out.reshape(*x.shape[:-1], data.shape[0])
    return out if bias is None else out + bias


def inputs(m, k, dtype=torch.bfloat16, seed=3):
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("block", "scale_shape"), [(None, (96, 5)), (32, (3, 5))])
def test_weights_are_really_preshuffled(kernel, block, scale_shape):
    layer = make_layer(96, 160, block)
    data, scale = load(layer, block=block or 1)
    assert type(layer.quant_method.kernel) is kernel
    process(layer)
    assert layer.weight.shape == (6, 5, 512)
    assert torch.equal(layout.unshuffle(layer.weight).view(torch.uint8), data.view(torch.uint8))
    assert not torch.equal(
        layer.weight.flatten().view(torch.uint8), data.flatten().view(torch.uint8)
    )
    assert layer.weight_scale.shape == scale_shape
    assert layer.weight_scale.dtype == torch.uint8
    bias = torch.randn(96).bfloat16()
    for m in (1, 7, 33):
        x = inputs(m, 160)
        assert torch.equal(layer.quant_method.apply(layer, x), expected(x, data, scale))
        assert torch.equal(
            layer.quant_method.apply(layer, x, bias), expected(x, data, scale, bias)
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_identity_input_of_mla_absorption(dtype):
    """vLLM multiplies kv_b_proj by an identity to get its values; MXFP8 holds 0 and 1."""
    layer = make_layer(64, 96)
    data, scale = load(layer)
    process(layer)
    got = layer.quant_method.apply(layer, torch.eye(96, dtype=dtype)).T
    want = (data.double() * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, 1)).to(
        dtype
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("n", "k", "shuffled"),
    [
        (16, 32, True),
        (32, 96, True),
        (96, 288, True),
        (1168, 576, True),
        (1160, 96, False),
        (24, 32, False),
        (8, 288, False),
    ],
)
@pytest.mark.parametrize("block", [None, 32])
def test_odd_shapes_are_decided_at_load_and_right_either_way(n, k, shuffled, block):
    layer = make_layer(n, k, block)
    data, scale = load(layer, block=block or 1)
    process(layer)
    assert (layer.weight.ndim == 3) == shuffled
    assert layer.quant_method.kernel.verdict.ok == shuffled
    if not shuffled:
        assert torch.equal(layer.weight.view(torch.uint8), data.view(torch.uint8))
        assert f"N={n}" in layer.quant_method.kernel.verdict.text
    for m in (1, 33):
        x = inputs(m, k)
        assert torch.equal(layer.quant_method.apply(layer, x), expected(x, data, scale))


def test_a_layer_read_elsewhere_keeps_its_bytes():
    layer = make_layer(64, 96, bmm=True)
    data, scale = load(layer)
    process(layer)
    assert torch.equal(layer.weight.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(layer.weight_scale, scale)
    assert layer.quant_method.kernel.verdict.code == "read_elsewhere"
    x = inputs(3, 96)
    assert torch.equal(layer.quant_method.apply(layer, x), expected(x, data, scale))


def test_declared_blocks_that_differ_are_served_per_row_with_a_warning(monkeypatch):
    from vllm_rocm_mxfp8.kernels import linear as module

    said = []
    monkeypatch.setattr(module.logger, "warning", lambda message, *a: said.append(message % a))
    layer = make_layer(96, 64, 32)
    data, scale = load(layer, block=32)
    layer.weight_scale.data[37, 1] += 1
    scale[37, 1] += 1
    process(layer)
    assert layer.weight_scale.shape == (96, 2)
    assert len(said) == 1
    assert "(N=96, K=64) is served with one scale per row" in said[0]
    x = inputs(5, 64)
    assert torch.equal(layer.quant_method.apply(layer, x), expected(x, data, scale))
    # Blocks that agree say nothing.
    said.clear()
    layer = make_layer(96, 64, 32)
    load(layer, block=32)
    process(layer)
    assert not said


def test_merged_parts_that_are_not_multiples_of_32():
    layer = make_layer(96, 64, 32, parts=[48, 48])
    data, _ = load(layer)
    scale = torch.cat(
        [
            torch.full((48, 2), 120, dtype=torch.uint8),
            torch.full((48, 2), 125, dtype=torch.uint8),
        ]
    )
    layer.weight_scale.data.copy_(scale)
    process(layer)
    assert layer.weight_scale.shape == (96, 2)
    x = inputs(5, 64)
    assert torch.equal(layer.quant_method.apply(layer, x), expected(x, data, scale))


def test_zero_padded_scales_of_merged_parts():
    layer = make_layer(64, 64, 32)
    data, scale = load(layer, block=32)
    layer.weight.data.view(torch.uint8)[32:] = 0
    layer.weight_scale.data[32:] = 0
    data.view(torch.uint8)[32:] = 0
    scale[32:] = 0
    process(layer)
    got = layer.quant_method.apply(layer, inputs(5, 64))
    assert torch.equal(got, expected(inputs(5, 64), data, scale))
    assert (got[:, 32:] == 0).all()


@pytest.mark.parametrize("block", [None, 32])
def test_dummy_load_then_real_weights(block):
    """Uniform dummy scales must not choose another layout than real ones."""
    dummy = make_layer(64, 96, block)
    dummy.weight.data.zero_()
    dummy.weight_scale.data.fill_(120)
    process(dummy)
    real = make_layer(64, 96, block)
    data, scale = load(real, block=block or 1)
    process(real)
    assert dummy.weight.shape == real.weight.shape
    assert dummy.weight_scale.shape == real.weight_scale.shape
    dummy.weight.data.copy_(real.weight)
    dummy.weight_scale.data.copy_(real.weight_scale)
    x = inputs(4, 96)
    assert torch.equal(dummy.quant_method.apply(dummy, x), expected(x, data, scale))


def test_processing_twice_fails_loudly():
    layer = make_layer(64, 96)
    load(layer)
    process(layer)
    with pytest.raises(AssertionError):
        process(layer)  # vLLM's own check
    with pytest.raises(RuntimeError, match="preshuffled already"):
        layer.quant_method.kernel.process_weights_after_loading(layer)


def test_processing_again_with_new_values_equals_a_fresh_load():
    layer = make_layer(64, 96, 32)
    load(layer, seed=1, block=32)
    process(layer)
    layer.weight = torch.nn.Parameter(torch.empty(64, 96).to(torch.float8_e4m3fn), False)
    layer.weight_scale = torch.nn.Parameter(torch.empty(64, 3, dtype=torch.uint8), False)
    data, scale = load(layer, seed=2, block=32)
    process(layer)
    x = inputs(4, 96)
    assert torch.equal(layer.quant_method.apply(layer, x), expected(x, data, scale))


SHAPES = {"blocks": (64, 64, 32), "rows": (64, 96, None), "declined": (24, 32, None)}


def three_layers():
    model = torch.nn.Module()
    for name, (n, k, block) in SHAPES.items():
        model.add_module(name, make_layer(n, k, block))
    layerwise.record_metadata_for_reloading(model)
    return model


def loaded(seed):
    model = three_layers()
    for name, (_, _, block) in SHAPES.items():
        load(getattr(model, name), seed, block or 1)
        process(getattr(model, name))
    return model


@pytest.mark.parametrize("first", ["dummy", "real"])
def test_vllms_layerwise_reload_equals_a_fresh_load_at_the_same_addresses(first):
    if first == "real":
        model = loaded(1)
    else:
        model = three_layers()
        for layer in model.children():
            layer.weight.data.zero_()
            layer.weight_scale.data.fill_(120)
            process(layer)
    parameters = dict(model.named_parameters())
    addresses = {name: p.data_ptr() for name, p in parameters.items()}
    layerwise.initialize_layerwise_reload(model)
    source = three_layers()
    for name, (_, _, block) in SHAPES.items():
        layer = getattr(model, name)
        data, scale = load(getattr(source, name), 2, block or 1)
        layer.weight.weight_loader(layer.weight, data)
        stored = scale[::block] if block else scale
        layer.weight_scale.weight_loader(layer.weight_scale, stored)
    layerwise.finalize_layerwise_reload(model, types.SimpleNamespace(dtype=torch.bfloat16))
    want = dict(loaded(2).named_parameters())
    for name, p in model.named_parameters():
        assert p.shape == want[name].shape, name
        assert torch.equal(p.view(torch.uint8), want[name].view(torch.uint8)), name
        assert p.data_ptr() == addresses[name], name
        assert p is parameters[name], name


def test_deepcopy_pickle_and_rewrapped_parameters_keep_the_layout():
    layer = make_layer(64, 96)
    data, scale = load(layer)
    process(layer)
    x = inputs(4, 96)
    want = expected(x, data, scale)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.quant_method.apply(copied, x), want)
    rewrapped = torch.nn.Parameter(layer.weight.data.clone(), requires_grad=False)
    layer.weight = rewrapped
    assert torch.equal(layer.quant_method.apply(layer, x), want)
    kernel = pickle.loads(pickle.dumps(layer.quant_method.kernel))
    assert type(kernel) is type(layer.quant_method.kernel)
    assert torch.equal(kernel.apply_weights(layer, x), want)


def test_preprocessed_weights_need_no_processing():
    """vLLM's weight cache hands a consumer tensors and never calls the kernel's processing."""
    producer = make_layer(64, 96)
    data, scale = load(producer)
    process(producer)
    consumer = make_layer(64, 96)
    assert consumer.quant_method.supports_pre_processed_weights
    consumer.weight = torch.nn.Parameter(producer.weight.data, requires_grad=False)
    consumer.weight_scale = torch.nn.Parameter(producer.weight_scale.data, requires_grad=False)
    x = inputs(4, 96)
    assert torch.equal(consumer.quant_method.apply(consumer, x), expected(x, data, scale))


def test_the_class_can_be_unpickled_in_a_fresh_process(tmp_path):
    layer = make_layer(64, 96)
    path = tmp_path / "kernel.pickle"
    path.write_bytes(pickle.dumps(layer.quant_method.kernel))
    run_python(
        f"""
import pickle
kernel = pickle.loads(open({str(path)!r}, "rb").read())
assert type(kernel).__name__ == "AiterMxfp8LinearKernel"
assert kernel.config.weight_shape == (64, 96)
from vllm_rocm_mxfp8.kernels.linear import AiterMxfp8LinearKernel
assert type(kernel) is AiterMxfp8LinearKernel
""",
        VLLM_ROCM_MXFP8_BACKEND="reference",
    )


def test_a_weight_that_nothing_here_can_serve_fails_at_load_not_in_the_forward():
    layer = make_layer(64, 96)
    load(layer)
    layer.weight = torch.nn.Parameter(layer.weight.data.view(torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"cannot be served.*uint8"):
        layer.quant_method.kernel.process_weights_after_loading(layer)


@pytest.mark.parametrize("switch", ["VLLM_ROCM_MONO_DECODE", "monokernel"])
def test_the_monokernel_reads_weights_itself_so_we_decline(kernel, monkeypatch, switch):
    if switch == "monokernel":
        config = types.SimpleNamespace(kernel_config=types.SimpleNamespace(monokernel=True))
        monkeypatch.setattr(vllm.config, "get_current_vllm_config_or_none", lambda: config)
    else:
        monkeypatch.setenv(switch, "1")
    ok, reason = kernel.can_implement(None)
    assert not ok
    assert switch in reason


def test_a_layer_of_another_kernel_does_not_hide_the_others_from_the_report(monkeypatch):
    ours = make_layer(64, 96)
    load(ours)
    process(ours)
    foreign = torch.nn.Module()
    foreign.weight = torch.nn.Parameter(torch.zeros(32, 32), requires_grad=False)
    emulation = kernel_list.EmulationMxfp8LinearKernel(
        types.SimpleNamespace(weight_shape=(32, 32))
    )
    foreign.quant_method = types.SimpleNamespace(kernel=emulation)
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "AiterMxfp8LinearKernel")
    worker = fake_worker({"ours": ours, "foreign": foreign})
    worker.rank = None
    assert after_load.compat.worker_rank(worker) == 0
    rows = after_load.collect(worker)
    assert [(r.layer, r.ours, r.code) for r in rows] == [
        ("ours", True, ""),
        ("foreign", False, "not_selected"),
    ]
    assert "VLLM_DISABLED_KERNELS names AiterMxfp8LinearKernel" in rows[1].reason


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (
            lambda layer: setattr(
                layer, "weight", torch.nn.Parameter(layer.weight.data.bfloat16())
            ),
            "bfloat16",
        ),
        (
            lambda layer: setattr(
                layer, "weight_scale", torch.nn.Parameter(layer.weight_scale.data[:, :1], False)
            ),
            r"\[64, 1\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_declined_with_a_reason(break_it, words):
    import re

    from vllm_rocm_mxfp8.kernels.linear import judge

    layer = make_layer(64, 96)
    load(layer)
    break_it(layer)
    verdict, _ = judge(layer, 64, 96)
    assert verdict.code == "tensors"
    assert re.search(words, verdict.text)


def fake_worker(layers, **changes):
    model = torch.nn.Module()
    for name, layer in layers.items():
        model.add_module(name, layer)
    runner = types.SimpleNamespace(model=model)
    return types.SimpleNamespace(model_runner=runner, rank=0, vllm_config=None, **changes)


def test_the_report_lists_every_linear_with_its_reason():
    ours, odd, raw = make_layer(64, 96), make_layer(24, 32), make_layer(64, 96, bmm=True)
    for layer in (ours, odd, raw):
        load(layer)
        process(layer)
    rows = after_load.collect(fake_worker({"qkv": ours, "odd": odd, "wo_a": raw}))
    assert [(r.layer, r.ours, r.code) for r in rows] == [
        ("qkv", True, ""),
        ("odd", False, "n_tile"),
        ("wo_a", False, "read_elsewhere"),
    ]
    assert [(r.n, r.k, r.block) for r in rows] == [
        (64, 96, "1x32"),
        (24, 32, "1x32"),
        (64, 96, "1x32"),
    ]
    # A draft model is counted too, under its own prefix.
    worker = fake_worker({"qkv": ours})
    worker.model_runner.drafter = types.SimpleNamespace(
        model=fake_worker({"fc": odd}).model_runner.model
    )
    assert [r.layer for r in after_load.collect(worker)] == ["qkv", "draft.fc"]


PEAK = """
import torch, vllm.model_executor.kernels.linear as kernel_list
import vllm_rocm_mxfp8
vllm_rocm_mxfp8.register()
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import modelopt
parameter.get_tensor_model_parallel_rank = lambda: 0
parameter.get_tensor_model_parallel_world_size = lambda: 1
N, K = 8192, 16384                      # 128 MiB each
def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) / 1024
layers = []
with set_current_vllm_config(VllmConfig()):
    for i in range(4):
        layer = torch.nn.Module()
        spec, _, fmt = modelopt.resolve("MXFP8", None, "")
        context = modelopt.CkptCtx(scale_block_size=(32, 32)) if i % 2 else modelopt.CkptCtx()
        layer.quant_method = modelopt.ModelOptLinearMethod(spec, context, fmt)
        layer.quant_method.create_weights(layer, K, [N], K, N, torch.bfloat16,
                                          weight_loader=lambda p, w: None)
        layer.weight.data.view(torch.uint8).fill_(56)
        layer.weight_scale.data.fill_(120)
        layers.append(layer)
# Warm up allocators and thread pools on a small one.
from vllm_rocm_mxfp8 import layout
layout.shuffle(torch.zeros(1024, 1024, dtype=torch.uint8))
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
for layer in layers:
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.ndim == 3
peak = status("VmHWM") - before
assert peak < 1.25 * 128, f"peak is {peak:.0f} MiB above the model, one weight is 128"
assert status("VmRSS") - before < 0.25 * 128
print("PEAK OK")
"""


def test_loading_needs_one_weight_above_the_model():
    done = run_python(
        PEAK, VLLM_ROCM_MXFP8_BACKEND="reference", MALLOC_MMAP_THRESHOLD_="1048576"
    )
    assert "PEAK OK" in done.stdout

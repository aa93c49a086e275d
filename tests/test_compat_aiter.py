import importlib
import importlib.metadata
import logging
import sys

import pytest
from doubles import aiter_double, shared_data

from vllm_rocm_mxfp8.compat import aiter

DATA = shared_data()
TABLE = DATA / aiter_double.TABLE_FILE if DATA else None


@pytest.fixture(autouse=True)
def fresh_probe():
    aiter.probe.cache_clear()
    yield
    aiter.probe.cache_clear()


def test_importing_the_module_imports_nothing_of_aiter():
    with aiter_double.install(table=TABLE) as double:
        assert aiter.installed_version() == "0.1.28"
        assert double.imports == []
        assert "aiter" not in sys.modules


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.skipif(DATA is None, reason="../shared/data is not here")
def test_both_generations_of_the_lookup(generation):
    with aiter_double.install(generation, table=TABLE):
        found = aiter.probe()
        assert isinstance(found, aiter.Aiter), found
        assert found.version == "0.1.28"
        assert found.is_tuned(5120, 2048, "32x32", (1, 32, 512, 8192))
        assert not found.is_tuned(5120, 1024, "32x32", (1,))
        assert not found.is_tuned(5120, 2048, "1x32", (1,))
        assert not found.reads_1x32()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"broken": "ImportError"}, "import failed with ImportError"),
        ({"broken": "RuntimeError"}, "import failed with RuntimeError"),
        ({"broken": "AssertionError"}, "import failed with AssertionError"),
        ({"broken": "OSError"}, "import failed with OSError"),
        ({"generation": "old"}, "has no get_mxscale_bpreshuffle_config"),
        ({"broken": "no_op"}, "has no gemm_a8w8_blockscale_bpreshuffle"),
    ],
)
def test_what_is_missing_becomes_a_reason_with_the_version(options, words):
    with aiter_double.install(version="0.1.21", table=TABLE, **options):
        found = aiter.probe()
    assert isinstance(found, str)
    assert words in found
    assert "AITER 0.1.21" in found
    assert "\n" not in found


def test_no_aiter_at_all():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("amd-aiter")
    assert aiter.probe() == "AITER is not installed"
    assert aiter.installed_version() == "unknown"


@pytest.mark.parametrize("broken", ["csv", "lookup_raises"])
def test_a_lookup_that_raises_counts_as_untuned_and_says_so_once(broken, monkeypatch):
    said = []
    monkeypatch.setattr(aiter.log, "warning", lambda message, *a: said.append(message % a))
    aiter._warn_once.cache_clear()
    with aiter_double.install(broken=broken, table=TABLE):
        found = aiter.probe()
        assert isinstance(found, aiter.Aiter), found
        assert not found.is_tuned(5120, 2048, "32x32", (1,))
        assert not found.is_tuned(5120, 2048, "32x32", (1,))
    assert len(said) == 1
    assert "tuned table cannot be read" in said[0]


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({"supports_1x32": True}, True),
        ({"supports_1x32": False}, False),
        ({"supports_1x32": True, "without": ["bmm_a8w8_mxfp8_supported"]}, False),
    ],
)
def test_1x32_is_what_aiter_says(options, runs):
    with aiter_double.install(table=TABLE, **options):
        found = aiter.probe()
        assert isinstance(found, aiter.Aiter), found
        assert found.reads_1x32() == runs


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_untuned_warnings_come_once_per_shape_not_once_per_m(generation):
    logger = logging.getLogger("aiter")
    before = list(logger.filters)
    logger.filters.clear()
    try:
        with aiter_double.install(generation, table=TABLE, cu_num=64) as double:
            found = aiter.probe()
            assert isinstance(found, aiter.Aiter), found
            said = []
            handler = logging.Handler()
            handler.emit = said.append
            logger.addHandler(handler)
            try:
                for n in (5120, 8192):
                    for m in range(1, 40):
                        found.lookup(m, n, 2048, "32x32")
                logger.warning("something else")
                logger.warning("something else")
            finally:
                logger.removeHandler(handler)
            assert double is not None
    finally:
        logger.filters[:] = before
    assert len(said) == 4, [r.getMessage() for r in said]


@pytest.mark.parametrize("count", [3, 6])
def test_a_lookup_of_another_signature_is_refused(monkeypatch, count):
    with aiter_double.install(table=TABLE):
        module = importlib.import_module("aiter.ops.gemm_op_a8w8")

        names = ["a", "b", "c", "d", "e", "f"][:count]
        lookup = eval(f"lambda {', '.join(names)}: None")
        monkeypatch.setattr(module, "get_mxscale_bpreshuffle_config", lookup)
        found = aiter.probe()
    assert isinstance(found, str)
    assert f"takes ({', '.join(names)}), expected (m, n, k, w_scale_block[, bmm])" in found

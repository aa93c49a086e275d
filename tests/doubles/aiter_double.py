"""A fake ``aiter`` package that keeps AITER's contract, for machines without AITER.

In this process, through the import system (so nothing is in ``sys.modules`` until somebody
imports it)::

    with aiter_double.install(table=..., generation="v1") as aiter:
        ...
        assert aiter.imports == []

In a subprocess, as a folder for PYTHONPATH::

    aiter_double.write_package(tmp_path, broken="OSError", calls_file=...)
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from . import aiter_op, shared_data
from .aiter_api import Api, mxscale_w_scale_block, shuffle_weight
from .aiter_spec import GEMM, IMPORT_ERRORS, Call, SilentlyWrong, Spec, import_error

__all__ = [
    "Call",
    "SilentlyWrong",
    "Spec",
    "current",
    "install",
    "shared_data",
    "write_package",
]

DISTRIBUTION = "amd-aiter"
_FOLDER_NAME = DISTRIBUTION.replace("-", "_")
TABLE_FILE = "aiter_mxscale_bpreshuffle_gfx950.csv"
_HEURISTIC = "aiter.ops.flydsl.batched_gemm_a8w8_gfx950"
_PROBE = "aiter.ops.flydsl.batched_gemm_a8w8"
PACKAGES = ("aiter", "aiter.ops", "aiter.ops.flydsl", "aiter.jit", "aiter.jit.utils")
MODULES = (
    *PACKAGES,
    "aiter.ops.gemm_op_a8w8",
    "aiter.ops.shuffle",
    "aiter.jit.utils.chip_info",
    _PROBE,
    _HEURISTIC,
)

_current: "Handle | None" = None


def current() -> "Handle":
    """The installed double; RuntimeError when there is none."""
    if _current is None:
        raise RuntimeError("no AITER double is installed")
    return _current


def _current_api() -> Api:
    return current().api


# --- one installed double -----------------------------------------------------------------


class Handle:
    """An installed double.

    calls: every GEMM call, refused ones too; launches: those that reach the GPU; imports:
    ``aiter`` modules whose import was started, in order; warnings: lines of logger
    ``aiter`` at WARNING and above; compiles: (kernelName, B, N, K) compiled ahead of time.
    """

    def __init__(self, spec: Spec, undo: Callable[[], None] = lambda: None):
        self.spec = spec
        self.api = Api(spec, self._record)
        self.calls: list[Call] = []
        self.imports: list[str] = []
        self.warnings: list[str] = []
        self.compiles: list[tuple[str, int, int, int]] = []
        self._undo = undo
        self._cleanup = contextlib.ExitStack()

    @property
    def launches(self) -> list[Call]:
        return [call for call in self.calls if call.launched]

    @property
    def lookup(self):
        """The lru_cache object, without importing anything."""
        return self.api.get_config

    def clear(self) -> None:
        """Forgets what was recorded; caches of the double stay as they are."""
        for record in (self.calls, self.imports, self.warnings, self.compiles):
            record.clear()

    def uninstall(self) -> None:
        """Restores sys.modules, sys.meta_path and the logger. A second call does nothing."""
        self._undo()
        self._undo = lambda: None
        self._cleanup.close()

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exc) -> None:
        self.uninstall()

    def _record(self, call: Call) -> None:
        self.calls.append(call)
        self._write({"call": asdict(call)})

    def _write(self, event: dict) -> None:
        if self.spec.calls_file:
            line = json.dumps({"pid": os.getpid()} | event) + "\n"
            # One unbuffered append per line: several processes share the file.
            with open(self.spec.calls_file, "ab", buffering=0) as file:
                file.write(line.encode())

    def import_module(self, name: str) -> dict:
        """What module ``name`` contains; raises as a broken AITER does. Side effects of
        the real import too: op registration and logger set-up."""
        self.imports.append(name)
        self._write({"import": name})
        spec = self.spec
        if name == "aiter":
            if spec.broken in IMPORT_ERRORS:
                raise import_error(spec.broken)
            self._set_up_logger()
        elif name.startswith("aiter.ops.flydsl"):
            self.api.import_flydsl()
        elif name == "aiter.ops.gemm_op_a8w8":
            aiter_op.unregister() if spec.broken == "no_op" else aiter_op.register(_current_api)
        found = self._contents(name)
        missing = (GEMM, *spec.without) if spec.broken == "no_op" else spec.without
        return {key: value for key, value in found.items() if key not in missing}

    def _contents(self, name: str) -> dict:
        api, new = self.api, self.spec.generation != "old"
        arch = {"get_gfx": api.get_gfx, "get_cu_num": api.get_cu_num}
        arch["get_gfx_runtime"] = api.get_gfx_runtime
        if name == "aiter":
            # vLLM 0.32 imports these two from the top level; whether AITER re-exports
            # anything else of them is unknown, so nothing else is here.
            ops = importlib.import_module("aiter.ops.gemm_op_a8w8")
            names = (GEMM, "gemm_a8w8_blockscale")
            exported = {key: getattr(ops, key) for key in names if hasattr(ops, key)}
            return exported | ({"__version__": self.spec.version} if self.spec.version else {})
        if name == "aiter.ops.gemm_op_a8w8":
            found = arch | {
                GEMM: aiter_op.gemm_a8w8_blockscale_bpreshuffle,
                "gemm_a8w8_blockscale": api.gemm_a8w8_blockscale,
            }
            if new:
                found["get_mxscale_bpreshuffle_config"] = api.get_config
                found["_load_mxscale_bpreshuffle_tuned"] = api.load_tuned
                found["mxscale_w_scale_block"] = mxscale_w_scale_block
                # The page names the probe's home (_PROBE); that it is visible here as
                # well is an assumption. `without=` hides it in both places.
                found["bmm_a8w8_mxfp8_supported"] = api.bmm_a8w8_mxfp8_supported
            return found
        if name == _PROBE and new:
            return {"bmm_a8w8_mxfp8_supported": api.bmm_a8w8_mxfp8_supported}
        if name == _HEURISTIC and new:
            return {
                "pick_bmm_kernel_name": api.pick_bmm_kernel_name,
                "compile_bmm_a8w8_mxfp8_gfx950": self._compile,
            }
        return {
            "aiter.ops.shuffle": {"shuffle_weight": shuffle_weight},
            "aiter.jit.utils.chip_info": arch,
        }.get(name, {})

    def _compile(self, kernel_name, b, n, k, scale_block, x_scale_transposed=False) -> None:
        self.api.check_kernel(kernel_name, n, k, scale_block, 128 if x_scale_transposed else 32)
        self.compiles.append((kernel_name, b, n, k))
        self._write({"compile": [kernel_name, b, n, k]})

    def _set_up_logger(self) -> None:
        """INFO unless AITER_LOG_LEVEL, its own stderr handler, propagate off: neither
        caplog nor vLLM's logging configuration sees its lines."""
        logger = self.api.logger
        level, propagate = logger.level, logger.propagate
        logger.setLevel(os.environ.get("AITER_LOG_LEVEL", "INFO"))
        logger.propagate = False
        stream = logging.StreamHandler(sys.stderr)
        stream.setFormatter(logging.Formatter("[aiter] %(levelname)s %(message)s"))
        keep = logging.Handler(logging.WARNING)
        keep.emit = lambda record: self.warnings.append(record.getMessage())
        for handler in (stream, keep):
            logger.addHandler(handler)
            self._cleanup.callback(logger.removeHandler, handler)
        self._cleanup.callback(logger.setLevel, level)
        self._cleanup.callback(setattr, logger, "propagate", propagate)


# --- in this process ----------------------------------------------------------------------


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, version: str):
        self._version = version

    def read_text(self, filename: str) -> str | None:
        if filename == "METADATA":
            return _metadata(self._version)
        return None

    def locate_file(self, path):
        return Path(path)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, handle: Handle):
        self.handle = handle

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in MODULES:
            return None
        is_package = fullname in PACKAGES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module) -> None:
        vars(module).update(self.handle.import_module(module.__name__))

    def find_distributions(self, context) -> Iterator[importlib.metadata.Distribution]:
        version = self.handle.spec.version
        if version and context.name in (None, DISTRIBUTION, _FOLDER_NAME):
            yield _Distribution(version)


def _metadata(version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n"


def _take_modules() -> dict:
    names = [name for name in sys.modules if name == "aiter" or name.startswith("aiter.")]
    return {name: sys.modules.pop(name) for name in names}


def install(
    generation: str = "v2",
    broken: str | None = None,
    table: str | Path | None = None,
    cu_num: int = 256,
    gfx: str = "gfx950",
    **options,
) -> Handle:
    """Makes ``import aiter`` find the double, until ``uninstall()`` (or leaving a with).

    generation: ``v2`` (lookup takes 5 arguments), ``v1`` (4), ``old`` (no lookup; E8M0
        scales are widened, the numbers are wrong as they would be).
    broken: ``ImportError``, ``RuntimeError``, ``AssertionError``, ``OSError`` (raised by
        ``import aiter``), ``no_op``, ``csv``, ``lookup_raises``, ``flydsl`` (importing
        ``aiter.ops.flydsl`` raises).
    table: tuned CSV; None: every lookup misses. AITER's own variable wins over it.
    cu_num, gfx: of the simulated GPU, halves of the table's key.
    options: version (None: no metadata and no ``__version__``), fault (``swapped_scale``,
        ``unshuffled``), supports_1x32 (False; True; ``probe_only``: the probe says yes, the
        kernel raises), rows_1x32 ((M, N, K) or (M, N, K, kernelName), tuned rows to add),
        without (names to leave out of every module), calls_file (JSON lines are appended).

    Raises ValueError for an unknown choice. Installs nest; uninstall in reverse order.
    """
    global _current
    handle = Handle(_spec(generation, broken, table, cu_num, gfx, **options))
    if handle.spec.broken == "no_op":
        aiter_op.unregister()
    finder, previous, hidden = _Finder(handle), _current, _take_modules()

    def undo() -> None:
        global _current
        if _current is not handle:
            raise RuntimeError("another AITER double was installed on top of this one")
        _take_modules()
        sys.modules.update(hidden)
        sys.meta_path.remove(finder)
        _current = previous

    handle._undo = undo
    sys.meta_path.insert(0, finder)
    _current = handle
    return handle


def _spec(
    generation="v2", broken=None, table=None, cu_num=256, gfx="gfx950", **options
) -> Spec:
    rows = tuple(tuple(row) for row in options.pop("rows_1x32", ()))
    without = tuple(options.pop("without", ()))
    calls_file = options.pop("calls_file", None)
    return Spec(
        generation=generation,
        broken=broken,
        table=str(table) if table else None,
        cu_num=cu_num,
        gfx=gfx,
        rows_1x32=rows,
        without=without,
        calls_file=str(calls_file) if calls_file else None,
        **options,
    )


# --- in a subprocess ----------------------------------------------------------------------

_STUB = '''\
"""Written by aiter_double.write_package: loads the double without touching sys.path."""
import importlib.util
import sys

if "doubles" not in sys.modules:
    spec = importlib.util.spec_from_file_location("doubles", {init!r})
    sys.modules["doubles"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["doubles"])
from doubles import aiter_double

globals().update(aiter_double.adopt({options!r}).import_module(__name__))
'''


def adopt(options: dict) -> Handle:
    """For the written package: the double of this process, made on first use."""
    global _current
    if _current is None:
        _current = Handle(_spec(**options))
    return _current


def write_package(folder: str | Path, **options) -> Path:
    """Writes ``aiter/`` and its metadata into ``folder``, replacing what an earlier call
    left there (bytecode too), and returns ``folder``.

    options: as for :func:`install`. A process with the folder on PYTHONPATH imports the
    double through the normal import system; there ``aiter_double.current()`` (``from
    doubles import aiter_double`` after ``import aiter``) is the handle. Children of that
    process write to the same ``calls_file``.
    """
    folder = Path(folder)
    spec = asdict(_spec(**options))
    text = _STUB.format(init=str(Path(__file__).parent / "__init__.py"), options=spec)
    shutil.rmtree(folder / "aiter", ignore_errors=True)
    for old in folder.glob(f"{_FOLDER_NAME}-*.dist-info"):
        shutil.rmtree(old)
    for name in MODULES:
        place = folder.joinpath(*name.split("."))
        path = place / "__init__.py" if name in PACKAGES else place.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if spec["version"]:
        info = folder / f"{_FOLDER_NAME}-{spec['version']}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(_metadata(spec["version"]))
    return folder

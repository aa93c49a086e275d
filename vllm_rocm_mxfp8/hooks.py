"""Run a callback right after a module has been imported by somebody else.

``register()`` runs in the API server too, where importing vLLM's kernel list costs
about 10 s that the server would otherwise not pay. So nothing is imported here: the
callback waits until vLLM itself imports the module.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

Callback = Callable[[types.ModuleType], None]


def on_import(module_name: str, callback: Callback) -> None:
    """Call ``callback(module)`` each time ``module_name`` has been executed.

    At once when that has already happened, and again after a reload; callbacks must be
    idempotent and must not raise. A module in the middle of its own import (this code may
    run inside it: vLLM resolves the platform while its modules load) is picked up at the
    next import of anything, or at the next ``on_import``.
    """
    finder = _installed_finder()
    callbacks = finder.callbacks.setdefault(module_name, [])
    if callback not in callbacks:
        callbacks.append(callback)
    module = sys.modules.get(module_name)
    if _is_executed(module):
        callback(module)  # type: ignore[arg-type]
    elif module is not None:
        finder.executing.add(module_name)
    finder.run_executed()


def _installed_finder() -> "_Finder":
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder


def _is_executed(module: types.ModuleType | None) -> bool:
    if module is None:
        return False
    return not getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Finder(importlib.abc.MetaPathFinder):
    """Stands first on ``sys.meta_path`` and finds nothing itself: for an awaited module
    it hands out the ordinary spec with a loader that reports the end of execution."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        # Awaited modules whose execution had begun before anybody asked for them.
        self.executing: set[str] = set()
        self._searching = threading.local()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if self.executing:
            self.run_executed()
        if fullname not in self.callbacks or getattr(self._searching, "active", False):
            return None
        self._searching.active = True
        try:
            spec = self._ordinary_spec(fullname, path, target)
        finally:
            self._searching.active = False
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader, self)
        return spec

    def run_executed(self) -> None:
        for name in list(self.executing):
            if _is_executed(sys.modules.get(name)):
                self.executing.discard(name)
                self.run(name, sys.modules[name])

    def run(self, name: str, module: types.ModuleType) -> None:
        for callback in list(self.callbacks.get(name, ())):
            callback(module)

    def _ordinary_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _ReportingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        # Source inspection and pickling must meet the ordinary loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        name = module.__name__
        # Somebody may execute a private copy that never becomes the module.
        if sys.modules.get(name) is module:
            self._finder.run(name, module)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

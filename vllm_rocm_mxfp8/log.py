"""The package's logger: one prefix, visible wherever vLLM's own lines are."""

import logging
from collections.abc import MutableMapping
from typing import Any

PREFIX = "[rocm-mxfp8]"


class _Prefixed(logging.LoggerAdapter):  # type: ignore[type-arg]
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        return f"{PREFIX} {msg}", kwargs


# A child of vLLM's logger: "vllm" has the handler and the level, and does not
# propagate, so a logger named after this package would print nothing.
logger = _Prefixed(logging.getLogger("vllm.rocm_mxfp8"), {})

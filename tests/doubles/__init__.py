"""Stand-ins for libraries that cannot run here. Each follows a contract page, no code of
the original. ``from doubles import aiter_double`` (pytest puts ``tests/`` on the path)."""

import os
from pathlib import Path


def shared_data() -> Path | None:
    """Folder of the measured tables (tuned CSV, model shapes), or None: skip with a reason.

    ``MXFP8_SHARED_DATA`` wins, else ``../shared/data`` next to the repository.
    """
    named = os.environ.get("MXFP8_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "data"
    return folder if folder.is_dir() else None

"""Progress bars for long work, in a terminal and in a notebook."""

from __future__ import annotations

import os
from typing import Any


def progress_bar(items: Any = None, description: str | None = None, **options: Any) -> Any:
    """tqdm's bar, left away where the environment variable TQDM_DISABLE is set: its notebook form overlooks that."""
    from tqdm.auto import tqdm  # here, as what shows no progress does without it

    return tqdm(items, description, disable="TQDM_DISABLE" in os.environ, **options)

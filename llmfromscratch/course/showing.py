"""Shows an object the way the place allows: rich in a notebook, as text elsewhere."""

from __future__ import annotations

import sys
from typing import Any


def show(obj: Any) -> None:
    """Displays OBJ in a notebook cell, and prints it where there is no notebook."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from IPython.display import display

        display(obj)
    else:
        print(obj)

"""Around a learner's code while it is checked: its output is caught, and what it changes globally is put back."""

from __future__ import annotations

import contextlib
import io
import random
import sys
import warnings
from collections.abc import Iterator

_SHOWN = 4000  # characters of a learner's output that are kept


class Caught(io.StringIO):
    """Keeps the first characters written to it, so that a loop that prints cannot flood a notebook."""

    def write(self, text: str) -> int:
        """Keeps what there is room for, and claims to have kept all."""
        super().write(text[: max(_SHOWN - self.tell(), 0)])
        return len(text)

    def shown(self) -> str:
        """What was written, with a mark where it was cut."""
        text = self.getvalue()
        return text if len(text) < _SHOWN else f"{text}\n... (cut)"


@contextlib.contextmanager
def caught_output() -> Iterator[Caught]:
    """Catches stdout and stderr (warnings too) of the block in one buffer."""
    buffer = Caught()
    with contextlib.redirect_stdout(buffer), contextlib.redirect_stderr(buffer), warnings.catch_warnings():
        yield buffer


@contextlib.contextmanager
def fixed_seeds(seed: int = 0) -> Iterator[None]:
    """Seeds Python's, numpy's and torch's generators for the block, and puts back what they were.

    torch's default dtype and gradient mode are put back too. A library that is not imported yet is left alone.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(seed)
        if torch is not None:
            stack.callback(torch.random.set_rng_state, torch.random.get_rng_state())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            torch.manual_seed(seed)
        yield

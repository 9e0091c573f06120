"""An LLM inference engine to read, to rebuild chapter by chapter, and to use.

`from llmfromscratch import LLM, SamplingParams` is all that most programs need. Importing the package is quick: torch
is loaded when a name is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llmfromscratch import learner_engine

if TYPE_CHECKING:
    from llmfromscratch.async_engine import AsyncEngine as AsyncEngine
    from llmfromscratch.divergence import Divergence as Divergence
    from llmfromscratch.divergence import diverges_at as diverges_at
    from llmfromscratch.engine import LLM as LLM
    from llmfromscratch.engine import Completion as Completion
    from llmfromscratch.engine import Piece as Piece
    from llmfromscratch.errors import CheckpointError as CheckpointError
    from llmfromscratch.errors import LLMFromScratchError as LLMFromScratchError
    from llmfromscratch.errors import OutOfMemory as OutOfMemory
    from llmfromscratch.errors import RequestError as RequestError
    from llmfromscratch.errors import TokenizerError as TokenizerError
    from llmfromscratch.sampling import SamplingParams as SamplingParams
    from llmfromscratch.sampling import TokenLogprobs as TokenLogprobs
    from llmfromscratch.scheduler import Request as Request

__version__ = "0.1.0"

_HOME = {
    "LLM": "engine",
    "AsyncEngine": "async_engine",
    "Completion": "engine",
    "Piece": "engine",
    "SamplingParams": "sampling",
    "TokenLogprobs": "sampling",
    "Request": "scheduler",
    "diverges_at": "divergence",
    "Divergence": "divergence",
    "CheckpointError": "errors",
    "LLMFromScratchError": "errors",
    "OutOfMemory": "errors",
    "RequestError": "errors",
    "TokenizerError": "errors",
}
__all__ = list(_HOME)

# an engine of the learner's own is chosen before any of its modules is imported
learner_engine.activate_from_environment()


def __getattr__(name: str) -> Any:
    # not kept in this module's namespace: after a learner's build() the next access must find the new object
    if name not in _HOME:
        raise AttributeError(f"module 'llmfromscratch' has no attribute {name!r}")
    return getattr(import_module(f"llmfromscratch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])

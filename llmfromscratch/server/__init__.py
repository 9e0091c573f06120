"""An OpenAI-compatible HTTP server on the engine: `llmfromscratch serve`, or from Python:

    from llmfromscratch.server import ServerSettings, create_app, run
    run(LLM(), port=8000)               # until Ctrl-C
    app = create_app(LLM())             # a FastAPI app, to be served or mounted by your own program

Nothing here is imported before it is asked for: what serving needs beyond the engine is an extra of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmfromscratch.server.app import create_app as create_app
    from llmfromscratch.server.notebook import serve as serve
    from llmfromscratch.server.running import run as run
    from llmfromscratch.server.settings import ServerSettings as ServerSettings

_HOME = {"create_app": "app", "run": "running", "serve": "notebook", "ServerSettings": "settings"}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'llmfromscratch.server' has no attribute {name!r}")
    require_extra()
    return getattr(import_module(f"llmfromscratch.server.{_HOME[name]}"), name)


def require_extra() -> None:
    """Raises ModuleNotFoundError, in one sentence, where the extra `serve` is not installed."""
    for package in ("fastapi", "uvicorn", "websockets", "prometheus_client"):
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Serving needs {package}, which is not installed; run: pip install 'llmfromscratch[serve]'"
            ) from error

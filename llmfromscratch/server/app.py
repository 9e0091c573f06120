"""The parts of the server joined into one FastAPI app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from llmfromscratch.async_engine import AsyncEngine
from llmfromscratch.engine import LLM
from llmfromscratch.server import chat, completions, errors, health, plain, sockets
from llmfromscratch.server.limits import BoundedBody
from llmfromscratch.server.page import page_router
from llmfromscratch.server.service import Service
from llmfromscratch.server.settings import ServerSettings
from llmfromscratch.server.watching import watch_router

_DESCRIPTION = """\
The OpenAI-compatible part is under /v1. /generate is the plain form, /ws the same over a WebSocket.
The fields of SamplingParams are taken everywhere; what is not supported, beams among it, is refused by name.
Temperature is 1 on /v1 when it is left out, as OpenAI's clients expect, and 0 (greedy) on /generate and /ws."""


def create_app(engine: LLM | AsyncEngine, settings: ServerSettings | None = None) -> FastAPI:
    """An app that answers with `engine`; `app.state.service` holds what its routes share.

    An engine that is given as an AsyncEngine stays open when the app ends: whoever made it closes it. It may be served
    by several apps, and used directly meanwhile.
    """
    own = isinstance(engine, LLM)
    service = Service(AsyncEngine(engine) if isinstance(engine, LLM) else engine, settings or ServerSettings())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        service.stopping = False
        yield
        service.stopping = True
        if own:
            await service.engine.close()

    app = FastAPI(
        title="llmfromscratch",
        version="1",  # of what is described here; the package has a number of its own
        description=_DESCRIPTION,
        docs_url=None,  # their pages would load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    errors.install(app)
    app.add_middleware(BoundedBody, settings=service.settings)
    for module in (completions, chat, plain, sockets, health):
        app.include_router(module.router)
    app.include_router(watch_router(service.engine.llm))
    app.include_router(page_router())
    return app

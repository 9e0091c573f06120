"""What the routes of one app share: the engine, the limits, the figures, and whether the server is about to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from llmfromscratch.async_engine import AsyncEngine
from llmfromscratch.engine import LLM
from llmfromscratch.server.limits import Admission
from llmfromscratch.server.prometheus import Figures
from llmfromscratch.server.settings import ServerSettings

_Result = TypeVar("_Result")
_ASIDE = 2  # threads for work that takes a while before an answer can begin


class Service:
    """One engine behind one app. stopping: what runs is finished, and new requests are refused."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings):
        self.engine, self.settings = engine, settings
        self.figures = Figures(engine.llm)
        self.admission = Admission(engine.llm, settings, self.figures)
        self.figures.streams.set_function(lambda: self.admission.streams)
        self.created = self.now()
        self.stopping = False
        self.under_way: set[asyncio.Task[None]] = set()  # each makes an answer
        self._threads = ThreadPoolExecutor(_ASIDE, thread_name_prefix="llmfromscratch-server-aside")

    def give_up(self) -> None:
        """Ends the answers that are being made, when a stop has waited long enough for them."""
        for task in list(self.under_way):
            task.cancel()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that makes an answer."""
        task = asyncio.create_task(work)
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        return task

    async def aside(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """Does in a thread what would hold up the answers of others. They have threads of their own, and few: many
        requests of this kind wait for each other, and for nobody else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    @staticmethod
    def now() -> int:
        """Seconds since 1970, as OpenAI's answers have them."""
        return int(time.time())

    @property
    def llm(self) -> LLM:
        """The engine's model and what belongs to it."""
        return self.engine.llm


def service_of(connection: Any) -> Service:
    """The service behind a request or a WebSocket."""
    service: Service = connection.app.state.service
    return service

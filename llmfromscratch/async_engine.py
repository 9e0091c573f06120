"""An engine for asyncio: one worker thread steps, and any number of consumers wait without blocking their event loops.

    consumer ── request ──▶ engine core ◀── step ── worker thread
       ▲                                               │
       └──────────── pieces, through the event loop ◀──┘

A consumer that reads slowly stops nobody: its pieces wait for it. One that goes away takes its request along.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Sequence

from llmfromscratch import sampling, scheduler
from llmfromscratch.answers import Completion, Piece, Reader
from llmfromscratch.engine import LLM, Prompt
from llmfromscratch.engine_core import EngineCore
from llmfromscratch.errors import RequestError

_log = logging.getLogger(__name__)


class AsyncEngine:
    """Serves an `LLM` to many consumers at once, from one event loop or several.

        async with AsyncEngine(llm) as engine:
            async for piece in engine.stream("Once upon a time", params): ...
            completion = await engine.generate("2 + 2 =", params)

    The worker thread begins with the first request, or with `start`; `close` ends it, and what is in flight with it.
    The `LLM` itself may be used at the same time.
    """

    def __init__(self, llm: LLM):
        self.llm = llm
        self._changed = threading.Condition()  # guards what follows
        self._consumers: list[_Consumer] = []
        self._worker: threading.Thread | None = None
        self._closed = False

    async def __aenter__(self) -> AsyncEngine:
        """Starts the worker."""
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes."""
        await self.close()

    def start(self) -> None:
        """Starts the worker thread, also after `close`. Raises RequestError while a `close` is under way."""
        with self._changed:
            if self._worker is not None and self._worker.is_alive():
                if self._closed:
                    raise RequestError("the AsyncEngine is closing; await its close() before it is started again.")
                return
            self._closed = False
            self._worker = threading.Thread(target=self._work, name="llmfromscratch-engine", daemon=True)
            self._worker.start()

    async def close(self) -> None:
        """Aborts what is in flight, whose consumers are told, and waits for the worker's end. Closing twice is fine."""
        with self._changed:
            self._closed, worker = True, self._worker
            self._changed.notify()
        while worker is not None and worker.is_alive():
            await asyncio.sleep(0.005)  # a step may have to end first; the event loop goes on meanwhile

    def stream(self, prompt: Prompt, params: sampling.SamplingParams | None = None) -> AsyncGenerator[Piece, None]:
        """Pieces of text as they become certain, those of several answers (params.n) side by side.

        Checks the prompt at once; the requests begin with the first piece. Leaving the loop, closing the generator or
        cancelling its task aborts them. Raises RequestError.
        """
        return self._pieces(self.llm.requests(prompt, params))

    async def generate(self, prompt: Prompt, params: sampling.SamplingParams | None = None) -> Completion:
        """The whole answer to one prompt. Cancelling aborts the request. Raises RequestError."""
        requests = self.llm.requests(prompt, params)
        texts = [""] * len(requests)
        async for piece in self._pieces(requests):
            texts[piece.choice] += piece.text
        return Completion.of(requests, texts)

    async def _pieces(self, requests: Sequence[scheduler.Request]) -> AsyncGenerator[Piece, None]:
        consumer = self._admit(requests)
        left = len(requests)
        try:
            while left:
                piece = await consumer.pieces.get()
                yield piece
                left -= piece.finish_reason is not None
        finally:
            self._dismiss(consumer)

    def _admit(self, requests: Sequence[scheduler.Request]) -> _Consumer:
        with self._changed:
            if self._closed:
                raise RequestError("the AsyncEngine is closed; start() it again, or make a new one.")
            self.start()
            consumer = _Consumer(requests, self.llm)
            for request in requests:
                request.arrival = self.llm.core.clock()
                self.llm.core.add(request)
            self._consumers.append(consumer)
            self._changed.notify()
        return consumer

    def _dismiss(self, consumer: _Consumer) -> None:
        with self._changed:
            if consumer in self._consumers:
                self._consumers.remove(consumer)
        consumer.abort(self.llm.core, "its consumer went away.")

    def _work(self) -> None:
        """The worker thread: steps while anybody waits, sleeps while nobody does."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._consumers or self._closed)
                consumers, closed = list(self._consumers), self._closed
                if closed and not consumers:
                    return
            if closed:
                for consumer in consumers:
                    consumer.abort(self.llm.core, "the AsyncEngine was closed.")
            try:
                self.llm.core.step()
            except BaseException:  # noqa: BLE001  all in flight was aborted and says why; the next request may do better
                _log.exception("A step failed.")
            over = [consumer for consumer in consumers if consumer.deliver(self.llm.core)]
            with self._changed:
                self._consumers = [consumer for consumer in self._consumers if consumer not in over]


class _Consumer:
    """One who waits for the pieces of one prompt's answers, in an event loop of theirs."""

    def __init__(self, requests: Sequence[scheduler.Request], llm: LLM):
        self.requests = requests
        self.readers = [Reader(request, llm.tokenizer) for request in requests]  # of those that are not over
        self.loop, self.pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

    def abort(self, core: EngineCore, error: str) -> None:
        """Ends what has not ended."""
        for request in self.requests:
            if not request.ended:
                core.abort(request, error)

    def deliver(self, core: EngineCore) -> bool:
        """Sends what is new, from the worker thread; True when no more will come."""
        for reader in list(self.readers):
            pieces = self._read(reader, core)
            if pieces and pieces[-1].finish_reason is not None:
                self.readers.remove(reader)
            try:
                for piece in pieces:
                    self.loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
            except RuntimeError:  # the event loop is closed: nobody waits there any more
                self.abort(core, "its event loop was closed.")
                return True
        return not self.readers

    def _read(self, reader: Reader, core: EngineCore) -> list[Piece]:
        try:
            with core.between_steps():
                return reader.new_pieces()
        except Exception as error:  # noqa: BLE001  this request's text is at fault, and nobody else's
            _log.exception("Tokens could not be turned into text.")
            core.abort(reader.request, f"its tokens could not be turned into text: {error}")
            return [Piece("", [], "abort", reader.request.error, reader.request.choice)]

"""A FastAPI app of one's own with the engine inside: it titles notes. Many may ask at once; they share each step.

python examples/engine_in_a_fastapi_app.py
curl -X POST localhost:8000/title -H 'Content-Type: application/json' -d '{"note": "Buy milk, then call Ada."}'
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field

from llmfromscratch import LLM, AsyncEngine, RequestError, SamplingParams


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The model is loaded once; leaving the block ends what is still in flight."""
    async with AsyncEngine(LLM()) as engine:
        app.state.engine = engine
        yield


app = FastAPI(title="Titles for notes", lifespan=lifespan)


class Note(BaseModel):
    """What is sent to /title."""

    note: str = Field(min_length=1, max_length=4000)


@app.post("/title")
async def title(body: Note, request: Request) -> dict[str, str]:
    """A title for a note."""
    engine: AsyncEngine = request.app.state.engine
    ask = f"Give this note a title of at most five words.\n\n{body.note}"
    try:
        prompt = engine.llm.chat_prompt([{"role": "user", "content": ask}])
        answer = await engine.generate(prompt, SamplingParams(max_tokens=16))
    except RequestError as error:  # such as a note longer than the context: the message has both lengths
        raise HTTPException(400, str(error)) from error
    if answer.error:  # such as a cache that cannot hold the request; other requests are not touched
        raise HTTPException(503, answer.error)
    return {"title": answer.text.strip().strip('"')}


if __name__ == "__main__":
    uvicorn.run(app, port=8000)

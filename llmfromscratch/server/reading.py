"""Reading a request's JSON: every oddity of an untrusted body is an error of the client, and costs little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class _SafeRequest(Request):
    async def json(self) -> Any:
        """The body's JSON. Raises ValueError, also for nesting beyond 200 levels, half a surrogate pair, and NaN."""
        return from_json(await self.body(), allow_inf_nan=False)


class SafeRoute(APIRoute):
    """A route whose body is read by a parser that has limits."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """FastAPI's handler, given a request of ours."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            response: Response = await handle(_SafeRequest(request.scope, request.receive))
            return response

        return handler

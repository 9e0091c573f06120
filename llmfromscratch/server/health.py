"""GET /health: the process answers. GET /ready: it takes requests. GET /metrics: figures for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from llmfromscratch.server import replies
from llmfromscratch.server.answering import check_running
from llmfromscratch.server.service import service_of

router = APIRouter(responses=replies.ERRORS)


@router.get("/health", summary="Whether the process answers", response_model=replies.StatusReply)
async def health() -> dict[str, str]:
    """Answers as long as the process does."""
    return {"status": "ok"}


@router.get("/ready", summary="Whether requests are taken", response_model=replies.StatusReply)
async def ready(request: Request) -> dict[str, str]:
    """Status 503 while the server is stopping."""
    check_running(service_of(request))
    return {"status": "ready"}


@router.get(
    "/metrics",
    summary="Figures for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}},
)
async def metrics(request: Request) -> Response:
    """The engine's figures and the server's, in Prometheus' text format."""
    return Response(service_of(request).figures.text(), media_type=CONTENT_TYPE_LATEST)

"""The page at /: four small files of HTML, CSS and JavaScript, served as they lie here and built by nothing.

    index.html ─▶ style.css
               └▶ app.js ─▶ chat.js (talks to /v1/chat/completions) ─┐
                        └▶ watch.js (draws /watch) ──────────────────┴▶ server.js (requests, keys, errors as sentences)

All addresses in it are relative, so the page also works behind a proxy that puts a path in front.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

_FOLDER = Path(__file__).parent
_TYPES = {".js": "text/javascript", ".css": "text/css"}
FILES = ("style.css", "app.js", "chat.js", "watch.js", "server.js")
_HEADERS = {
    # nothing is fetched from elsewhere, and no text of a model can become a script or a style
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for anew each time, so that an updated package shows its own page
}


def page_router() -> APIRouter:
    """GET / and the files that it names, under /page/. They hold no secrets: no key is asked for."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def index() -> Response:
        return FileResponse(_FOLDER / "index.html", media_type="text/html", headers=_HEADERS)

    def add(name: str) -> None:
        @router.get(f"/page/{name}")
        async def file() -> Response:
            return FileResponse(_FOLDER / name, media_type=_TYPES[Path(name).suffix], headers=_HEADERS)

    for name in FILES:
        add(name)
    return router

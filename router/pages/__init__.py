"""The embedded pages: one HTML file each, without anything from elsewhere.

A page's policy allows exactly its own script and style, by their digests, and calls to the router
that serves it. The pages hold no secret and need no key; what they call does.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

#: Path -> file.
PAGES = {"/": "chat.html", "/docs": "docs.html"}
_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page(name: str) -> Callable[[Request], Awaitable[Response]]:
    """What serves a page."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    headers = {
        "content-security-policy": content_policy(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def serve(_: Request) -> Response:
        return Response(text, media_type="text/html", headers=headers)

    return serve


def content_policy(text: str) -> str:
    """The Content-Security-Policy of a page (https://www.w3.org/TR/CSP3/)."""
    rules = [f"{kind}-src '{_digest(part)}'" for kind, part in _PARTS.findall(text)]
    closed = ["default-src 'none'", "base-uri 'none'", "form-action 'none'"]
    return "; ".join([*closed, *rules, "connect-src 'self'", "frame-ancestors 'none'"])


def _digest(part: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()

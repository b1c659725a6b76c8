"""`/kvflash/markdown`: renders the Markdown of an answer as HTML in which nothing can run, for the page."""

from __future__ import annotations

import nh3
from markdown_it import MarkdownIt
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .errors import ApiError
from .intake import Intake
from .turns import text_of

MAX_TEXT = 64 << 10
"""Characters of a text. The worst of so many takes two to three seconds, and holds the interpreter meanwhile. The page
shows a longer one as it is.
"""

_TAGS = {
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "s", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
"""What Markdown itself makes, but for images: an address in an answer must not be fetched."""

_ATTRIBUTES = {"a": {"href", "title"}, "ol": {"start"}}


def html(text: str) -> str:
    """Render Markdown. Tags that the text itself has are shown as text."""
    # a parser for each text: two threads may render at once
    made = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).render(text)
    return nh3.clean(made, tags=_TAGS, attributes=_ATTRIBUTES, url_schemes={"http", "https", "mailto"})


async def markdown(front: Intake, request: HttpRequest) -> Response:
    """Render Markdown as HTML in which nothing can run."""
    text = text_of(await front.body(request), "text", "")
    if len(text) > MAX_TEXT:
        raise ApiError(413, f"the text has {len(text)} characters, and {MAX_TEXT} is the most: show it as it is")
    return JSONResponse({"html": await front.work(request, html, text)})

"""`/kvflash/pdf`: the text of a PDF, for the page."""

from __future__ import annotations

from importlib.util import find_spec

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from .. import pip_line
from ..media.files import pdf_text
from .errors import ApiError
from .intake import Intake


async def pdf(front: Intake, request: HttpRequest) -> Response:
    """Return the text of a PDF, which is the body. Needs the extra `pdf`."""
    if find_spec("pypdf") is None:
        raise ApiError(501, f"PDFs need pypdf, which is not installed: {pip_line.install('pdf')}", code="not_served")
    data = await front.received(request, "application/pdf")
    pages, text = await front.work(request, pdf_text, bytes(data))
    return JSONResponse({"pages": pages, "text": text})

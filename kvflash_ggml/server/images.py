"""Images of a request: where they stand in its messages, and their files, within limits."""

from __future__ import annotations

import base64
import binascii
import secrets
from typing import Any

from ..batching.messages import Image
from ..errors import ConfigError, HostMemoryError
from .errors import ApiError
from .front import Front

MARK = f"<image-{secrets.token_hex(8)}>"
"""Stands for an image in the text of a message, until the template has made a prompt of it. No client knows it."""

IMAGES = ("image_url", "input_image")
"""Types of content parts that have an image."""

_DATA = "data:"


def image_part(url: Any) -> dict[str, Any]:
    """The content part of a chat for an image of another interface. url: a data URL, or what is refused as none."""
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(kind: Any, data: Any) -> str:
    """A data URL. kind: its type, as image/png; data: base64."""
    return f"{_DATA}{kind};base64,{data}"


class Images:
    """The images of one request, in the order of its messages."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._files: list[tuple[str, bytes]] = []  # where each stands in the request

    def take(self, part: dict[str, Any], where: str) -> str:
        """Take the image of a content part, and return what stands for it in the text. ApiError for one beyond a limit,
        or that no model here sees.
        """
        settings = self._front.settings
        if not self._front.prompts.sees:
            raise ApiError(
                400,
                f"{where}: the model {settings.alias!r} is served for text and sees no images: leave the image out, or "
                f"add --mmproj FILE where the server is started",
                code="not_text",
                param=where,
            )
        if len(self._files) == settings.max_images:
            message = f"{where}: a request may have {settings.max_images} images: --max-images"
            raise ApiError(400, message, code="too_many_images", param=where)
        self._files.append((where, self._file(part, where)))
        return MARK

    def _file(self, part: dict[str, Any], where: str) -> bytes:
        given: Any = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        if not isinstance(url, str) or not url.startswith(_DATA):
            raise ApiError(
                400,
                f"{where}: an image comes with the request, and no address or file is fetched: send it as "
                f"data:image/png;base64,...",
                code="invalid_image",
                param=where,
            )
        head, _, text = url.partition(",")
        most = self._front.settings.max_image_bytes
        if len(text) // 4 * 3 - 2 > most:
            message = (
                f"{where}: an image has about {len(text) // 4 * 3} bytes, and {most} is the most: --max-image-size"
            )
            raise ApiError(400, message, code="image_too_large", param=where)
        try:
            if not head.endswith(";base64"):
                raise ValueError
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            message = f"{where}: an image is no data URL in base64, as data:image/png;base64,..."
            raise ApiError(400, message, code="invalid_image", param=where) from None

    def tokens(self, prompt: str) -> tuple[list[int], tuple[Image, ...]]:
        """The tokens of a prompt, with those that stand for its images, and the images. On a thread of the front's.

        ApiError for an image that cannot be read, or that the template leaves out.
        """
        prompts = self._front.prompts
        if not self._files:
            return prompts.tokenize(prompt, add_special=True, parse_special=True), ()
        first, *texts = prompt.split(MARK)
        if len(texts) != len(self._files):
            message = f"the chat template writes {len(texts)} of {len(self._files)} images: send them in user messages"
            raise ApiError(400, message, code="invalid_image", param="messages")
        tokens, seen = prompts.tokenize(first, add_special=True, parse_special=True), []
        for (where, data), text in zip(self._files, texts, strict=True):
            try:
                image = prompts.see(data, most=self._front.settings.max_image_pixels)
            except ConfigError as err:
                raise ApiError(400, f"{where}: {err}", code="invalid_image", param=where) from None
            except HostMemoryError as err:
                raise ApiError(503, str(err), code="images_wait", retry_after_s=5) from None
            seen.append(image)
            tokens += [*image.tokens, *prompts.tokenize(text, add_special=False, parse_special=True)]
        return tokens, tuple(seen)

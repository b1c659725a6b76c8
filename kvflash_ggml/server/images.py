"""Images and sounds of a request: where they stand in its messages, and their files, within limits."""

from __future__ import annotations

import base64
import binascii
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.requests import Request as HttpRequest

from ..batching.messages import Image
from ..errors import ConfigError, HostMemoryError, brief
from ..media.files import MediaLimits
from . import fetch
from .errors import ApiError
from .front import Front

MARK = f"<image-{secrets.token_hex(8)}>"
"""Stands for an image or a sound in the text of a message, until the template has made a prompt. No client knows it."""

IMAGES = ("image_url", "input_image")
"""Types of content parts that have an image."""

SOUND = "input_audio"
"""The type of content parts that have a sound."""

_FORMATS = ("wav", "mp3", "flac")

_DATA = "data:"


def image_part(url: Any) -> dict[str, Any]:
    """Make the content part of a chat for an image of another interface. url: a data URL; others are refused later."""
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(kind: Any, data: Any) -> str:
    """Make a data URL. kind: its type, as image/png; data: base64."""
    return f"{_DATA}{kind};base64,{data}"


class RequestImages:
    """The images and sounds of one request, in the order of its messages. salt: of the request."""

    def __init__(self, front: Front, salt: str) -> None:
        self._front, self.salt = front, salt
        self._files: list[tuple[str, str, bytes]] = []  # where each stands in the request, and its kind
        self._urls: dict[int, str] = {}  # of files that are not fetched yet

    def take(self, part: dict[str, Any], where: str) -> str:
        """Take the image or the sound of a content part, and return what stands for it in the text.

        ApiError for one beyond a limit, or of a kind that no model here takes.
        """
        settings, prompts = self._front.settings, self._front.prompts
        sound = part.get("type") == SOUND
        if not (prompts.hears if sound else prompts.sees):
            what = ("hears no sound", "sound", "an audio") if sound else ("sees no images", "image", "a vision")
            raise ApiError(
                400,
                f"{where}: the model {settings.alias!r} {what[0]}: leave the {what[1]} out, or add --mmproj FILE where "
                f"the server is started, a projector with {what[2]} encoder",
                code="not_text",
                param=where,
            )
        if len(self._files) == settings.max_images:
            message = f"{where}: a request may have {settings.max_images} images and sounds: --max-images"
            raise ApiError(400, message, code="too_many_images", param=where)
        kind, data = ("audio", self._sound(part, where)) if sound else ("image", self._image(part, where))
        self._files.append((where, kind, data))
        return MARK

    def _image(self, part: dict[str, Any], where: str) -> bytes:
        given: Any = part.get("image_url")
        url = given.get("url") if isinstance(given, dict) else given
        text = url if isinstance(url, str) else ""
        web = text.startswith(("http://", "https://"))
        if web and self._front.settings.media_urls:
            self._urls[len(self._files)] = text
            return b""
        if not text.startswith(_DATA):
            raise ApiError(
                400,
                f"{where}: an image comes with the request, and no address or file is fetched: send it as "
                f"data:image/png;base64,...{', or start the server with --media-urls' * web}",
                code="invalid_image",
                param=where,
            )
        head, _, coded = text.partition(",")
        expected = "an image is no data URL in base64, as data:image/png;base64,..."
        return self._file(coded if head.endswith(";base64") else None, where, expected, "image")

    def of(self, messages: Collection[int]) -> RequestImages:
        """Return what some of the messages have, once all files are there. messages: their numbers."""
        some = RequestImages(self._front, self.salt)
        some._files = [file for file in self._files if int(file[0].split(".")[1]) in messages]
        return some

    async def fetch(self, http: HttpRequest) -> None:
        """Fetch the files that are named by URLs. ApiError for one that cannot be had, or not in time."""
        if self._urls:
            await self._front.work(http, self._fetch, fetches=True)

    def _fetch(self) -> None:
        until = time.monotonic() + fetch.SECONDS
        for i, url in self._urls.items():
            where, kind, _ = self._files[i]
            left = until - time.monotonic()
            try:
                if left <= 0:
                    most = f"the files of this request take longer than {fetch.SECONDS:g} seconds"
                    raise ConfigError(f"{brief(url)} is not fetched: {most}: send some of them as data URLs")
                self._files[i] = where, kind, fetch.fetch(url, self._front.settings.max_image_bytes, left)
            except ConfigError as err:
                raise ApiError(400, f"{where}: {err}", code="invalid_image", param=where) from None

    def _sound(self, part: dict[str, Any], where: str) -> bytes:
        given: Any = part.get(SOUND)
        sound = given if isinstance(given, dict) else {}
        if sound.get("format", "wav") not in _FORMATS:
            message = f"{where}: a sound is {str(sound['format'])[:40]!r}: send it as wav, mp3 or flac"
            raise ApiError(400, message, code="invalid_audio", param=where)
        return self._file(sound.get("data"), where, "a sound comes with the request, as data in base64", "audio")

    def _file(self, text: Any, where: str, expected: str, kind: str) -> bytes:
        """Decode a file that has come as base64. kind: image or audio."""
        limit = self._front.settings.max_image_bytes
        if isinstance(text, str) and len(text) // 4 * 3 - 2 > limit:
            message = f"{where}: a file has about {len(text) // 4 * 3} bytes, and {limit} is the most: --max-image-size"
            raise ApiError(400, message, code=f"{kind}_too_large", param=where)
        try:
            if not isinstance(text, str):
                raise ValueError
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(400, f"{where}: {expected}", code=f"invalid_{kind}", param=where) from None

    def tokens(self, prompt: str) -> tuple[list[int], tuple[Image, ...]]:
        """Return the tokens of a prompt, with those that stand for its media, and these. On a thread of the front's.

        ApiError for an image or a sound that cannot be read, or that the template leaves out.
        """
        prompts, settings = self._front.prompts, self._front.settings
        if not self._files:
            return prompts.tokenize(prompt, add_special=True, parse_special=True), ()
        first, *texts = prompt.split(MARK)
        if len(texts) != len(self._files):
            written = f"{len(texts)} of {len(self._files)} images and sounds"
            message = f"the chat template writes {written}: send them in user messages"
            raise ApiError(400, message, code="invalid_image", param="messages")
        tokens, seen = prompts.tokenize(first, add_special=True, parse_special=True), []
        limits = MediaLimits(settings.max_image_pixels, settings.max_audio_seconds)
        for (where, kind, data), text in zip(self._files, texts, strict=True):
            try:
                image = prompts.see(data, limits, self.salt)
            except ConfigError as err:
                raise ApiError(400, f"{where}: {err}", code=f"invalid_{kind}", param=where) from None
            except HostMemoryError as err:
                raise ApiError(503, str(err), code="images_wait", retry_after_s=5) from None
            seen.append(image)
            tokens += [*image.tokens, *prompts.tokenize(text, add_special=False, parse_special=True)]
        return tokens, tuple(seen)

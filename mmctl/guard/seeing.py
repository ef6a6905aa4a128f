"""What a request holds: images and their sizes, text, the limit of its output, whose turn it is.

The body is read as JSON and walked leniently: what has another shape than the API's is counted
as nothing and left to the backend to judge.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec

from mmctl.guard.images import Size, data_url, size_of
from mmctl.guard.refusal import Refusal

_IMAGES = frozenset({"image_url", "input_image", "image"})
_VIDEOS = frozenset({"video_url", "input_video", "video"})
_AUDIO = frozenset({"audio_url", "input_audio", "audio"})
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Image(msgspec.Struct):
    """One image of a request; ``part`` is its place in the document.

    ``size`` is absent of remote images, which are never fetched, and of unknown formats;
    ``problem`` is why a backend should not get it.
    """

    part: dict[str, Any]
    digest: str
    remote: bool = False
    size: Size | None = None
    problem: Refusal | None = None

    @property
    def url(self) -> str:
        """The image's address: ``data:`` with its bytes, or remote."""
        return _url(self.part) or ""

    def replace(self, url: str) -> None:
        """Put another address into the document."""
        value = self.part.get("image_url")
        if isinstance(value, dict):
            value["url"] = url
        else:
            self.part["image_url"] = url


class Seen(msgspec.Struct):
    """A request as the guard sees it.

    ``text_bytes`` counts UTF-8; ``output_tokens`` is the limit that the request states for one
    answer, absent where it states none. ``pair`` names its conversation and images, ``turns``
    are the messages so far. ``document`` is the body, parsed.
    """

    document: dict[str, Any]
    model: str = ""
    stream: bool = False
    output_tokens: int | None = None
    answers: int = 1
    texts: list[str] = []
    messages: int = 0
    turns: int = 0
    images: list[Image] = []
    videos: int = 0
    audios: int = 0
    pair: str = ""

    @property
    def modality(self) -> str:
        """What the request brings along, the heaviest first."""
        return "vision" if self.images or self.videos else "other" if self.audios else "text"

    @property
    def queue(self) -> str:
        """Which queue it belongs to: urgent text streams, images, or all else."""
        if self.images or self.videos:
            return "vision"
        return "stream" if self.stream and not self.audios else "default"

    @property
    def text_bytes(self) -> int:
        """Its texts in UTF-8."""
        return sum(
            len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
            for text in self.texts
        )


def look(body: bytes, most_pixels: int) -> Seen:
    """What ``body`` asks for. Raises Refusal for what is no JSON object."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        said = "too deep" if isinstance(error, RecursionError) else str(error)
        raise Refusal(400, "body_unreadable", f"the body is not JSON: {said}") from None
    if not isinstance(document, dict):
        raise Refusal(400, "body_unreadable", "the body is no JSON object")
    seen = Seen(document=document)
    model, answers = document.get("model"), document.get("n")
    seen.model = model if isinstance(model, str) else ""
    seen.stream = document.get("stream") is True
    seen.output_tokens = next(
        (limit for name in _LIMITS if (limit := _count(document.get(name)))), None
    )
    seen.answers = _count(answers) or 1
    texts: list[str] = []
    images: list[Image] = []
    opening = hashlib.blake2b(digest_size=8)
    for role, content in _messages(document):
        seen.messages += 1
        seen.turns += role == "assistant"
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, dict):
                _part(part, seen, texts, images, most_pixels)
        if role == "user" and not seen.pair:
            for text in texts:
                opening.update(text.encode("utf-8", "replace"))
            for image in images:
                opening.update(image.digest.encode())
            seen.pair = opening.hexdigest()
    tools = document.get("tools")
    if tools:
        texts.append(msgspec.json.encode(tools).decode())
    seen.texts, seen.images = texts, images
    return seen


def _count(value: Any) -> int | None:
    """``value`` where it is a positive number of something."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9:
        return int(value)
    return None


def _messages(document: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """(role, parts) of every message, prompt or input."""
    for name in ("messages", "input"):
        found = document.get(name)
        if not isinstance(found, list):
            continue
        for message in found:
            if isinstance(message, str):
                yield "user", [message]
            elif isinstance(message, dict):
                content, role = message.get("content"), message.get("role")
                parts = content if isinstance(content, list) else [content]
                yield role if isinstance(role, str) else "", parts
    for name in ("prompt", "input", "instructions"):
        found = document.get(name)
        if isinstance(found, str):
            yield "system" if name == "instructions" else "user", [found]
        elif name == "prompt" and isinstance(found, list):
            yield "user", found


def _part(
    part: dict[str, Any], seen: Seen, texts: list[str], images: list[Image], most_pixels: int
) -> None:
    kind, text = part.get("type"), part.get("text")
    if isinstance(text, str):
        texts.append(text)
    elif not isinstance(kind, str):
        return
    elif kind in _IMAGES:
        images.append(_image(part, most_pixels))
    elif kind in _VIDEOS:
        seen.videos += 1
    elif kind in _AUDIO:
        seen.audios += 1


def _url(part: dict[str, Any]) -> str | None:
    value = part.get("image_url", part.get("image"))
    if isinstance(value, dict):
        value = value.get("url")
    return value if isinstance(value, str) else None


def _image(part: dict[str, Any], most_pixels: int) -> Image:
    url = _url(part) or ""
    digest = hashlib.blake2b(url.encode("utf-8", "replace"), digest_size=12).hexdigest()
    image = Image(part=part, digest=digest)
    inline = data_url(url)
    if inline is None:
        image.remote = True
        return image
    try:
        image.size = size_of(inline[1])
    except Refusal as refusal:
        image.problem = refusal
        return image
    if image.size is not None and image.size.width * image.size.height > most_pixels:
        image.problem = Refusal(
            413, "image_too_large",
            f"an image of {image.size.width}x{image.size.height} pixels; at most {most_pixels}",
        )  # fmt: skip
    return image

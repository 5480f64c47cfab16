"""The media in a chat's messages: counted, measured, decoded from base64 or fetched, and made payloads of. Everything
that is refused is refused by the name of its part. Called by the chat service.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from runtime.errors import InvalidRequest, UnsupportedMedia, UnsupportedValue
from runtime.payload import Payload
from runtime.plan import Modality, Plan
from runtime.server.chat.schema import ContentPart, Message
from runtime.server.fetch import Budget, Fetcher, too_large
from runtime.server.media import decode_base64, media_payload
from runtime.server.settings import MEDIA_PREFIX, MediaSettings
from runtime.server.wire import shown

TASK = "chat"
CONTENT_TYPES: Mapping[Modality, tuple[str, ...]] = {
    Modality.AUDIO: ("audio/", "application/ogg"),
    Modality.IMAGE: ("image/",),
    Modality.VIDEO: ("video/",),
}
"""How the type of a file of a modality begins. Besides these, nothing said and plain bytes will do."""
ANY_CONTENT_TYPE = ("", "application/octet-stream", "binary/octet-stream")


@dataclass(frozen=True, slots=True)
class _Medium:
    """A part that is not text. index counts over all media of the request; name is the client's field."""

    index: int
    name: str
    part: ContentPart


class MediaReader:
    def __init__(self, plan: Plan, settings: MediaSettings) -> None:
        self._plan, self._settings = plan, settings
        self._fetcher = Fetcher(settings)
        self._limits = {
            Modality.AUDIO: settings.max_audios,
            Modality.IMAGE: settings.max_images,
            Modality.VIDEO: settings.max_videos,
        }

    def check(self, messages: list[Message]) -> None:
        """Raises for media that the model does not take, or for more of them than allowed."""
        counts: Counter[Modality] = Counter()
        taken = self._plan.tasks[TASK].inputs
        for medium in _media_of(messages):
            modality, name = medium.part.modality, medium.name
            counts[modality] += 1
            if modality not in taken:
                known = ", ".join(taken)
                raise UnsupportedValue(f"{name}: {self._plan.name} takes no {modality} but {known}", param=name)
            if counts[modality] > (limit := self._limits[modality]):
                setting = f"{MEDIA_PREFIX}MAX_{modality.upper()}S"
                raise InvalidRequest(f"{name}: at most {limit} of {modality} (limit {setting})", param=name)

    async def read(self, messages: list[Message], request_id: str) -> dict[Modality, list[Payload]]:
        """Modality -> payloads in the order of the messages. What has to be fetched is fetched at the same time."""
        media, budget = list(_media_of(messages)), Budget(self._plan.limits.max_body_bytes)
        reading = [asyncio.ensure_future(self._data(medium, budget)) for medium in media]
        try:
            found = await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        payloads: dict[Modality, list[Payload]] = {}
        for medium, data in zip(media, found, strict=True):
            clip, modality = medium.part.input_audio, medium.part.modality
            payload = media_payload(
                request_id,
                data,
                index=medium.index,
                modality=modality,
                media_format=clip.format if clip is not None else "",
                name=medium.name,
            )
            payloads.setdefault(modality, []).append(payload)
        return payloads

    async def _data(self, medium: _Medium, budget: Budget) -> bytes:
        """The bytes of the file."""
        part, name = medium.part, medium.name
        if part.input_audio is not None:
            return await self._decoded(part.input_audio.data, f"{name}.data", budget)
        url, name = _url_of(part), f"{name}.url"
        if url[:5].lower() == "data:":
            head, _, encoded = url[5:].partition(",")
            content_type, _, encoding = head.rpartition(";")
            if encoding.strip().lower() != "base64":
                raise InvalidRequest(f"{name}: {shown(url)}; expected data:<type>;base64,<data>", param=name)
            check_content_type(content_type, part.modality, name)
            return await self._decoded(encoded, name, budget)
        fetched = await self._fetcher.fetch(url, name, budget)
        check_content_type(fetched.content_type, part.modality, name)
        if not fetched.data:
            raise InvalidRequest(f"{name}: {shown(url)} is an empty file", param=name)
        return fetched.data

    async def _decoded(self, text: str, name: str, budget: Budget) -> bytes:
        size_bytes, limit = len(text) * 3 // 4 - text[-2:].count("="), self._settings.max_bytes
        if size_bytes > limit:
            raise too_large(f"{size_bytes} bytes", limit, name)
        budget.take(size_bytes)
        return await decode_base64(text, name)


def check_content_type(content_type: str, modality: Modality, name: str) -> None:
    """UnsupportedMedia for the type of something else."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ANY_CONTENT_TYPE and not kind.startswith(CONTENT_TYPES[modality]):
        expected = " or ".join(f"{start}*" if start.endswith("/") else start for start in CONTENT_TYPES[modality])
        raise UnsupportedMedia(f"{name}: content of type {shown(kind)}; expected {expected}", param=name)


def _media_of(messages: list[Message]) -> Iterator[_Medium]:
    index = 0
    for number, message in enumerate(messages):
        for position, part in enumerate(message.content):
            if part.modality is not Modality.TEXT:
                yield _Medium(index, f"messages[{number}].content[{position}].{part.type}", part)
                index += 1


def _url_of(part: ContentPart) -> str:
    (url,) = [given.url for given in (part.audio_url, part.image_url, part.video_url) if given is not None]
    return url

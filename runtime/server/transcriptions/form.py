"""Reading the multipart form of a transcription: the fields checked by name, the file as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from runtime.errors import InvalidRequest, UnsupportedMedia
from runtime.server.transcriptions.schema import LIST_FIELDS, TranscriptionForm
from runtime.server.wire import validate

MAX_FIELDS = 64


@dataclass(frozen=True, slots=True)
class Upload:
    """audio_format is the file name's ending, "" when it has none; the ear says whether it knows it."""

    form: TranscriptionForm
    data: bytes
    audio_format: str


async def read_form(request: Request) -> Upload:
    """InvalidRequest, UnsupportedValue or UnsupportedMedia name what is wrong with the form."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "multipart/form-data":
        raise UnsupportedMedia(f"content-type: {content_type!r}; expected multipart/form-data")
    async with request.form(max_files=1, max_fields=MAX_FIELDS) as form:
        file = form.get("file")
        fields = validate(TranscriptionForm, _fields(form))
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file: missing; expected an audio file", param="file")
        data = await file.read()
    if not data:
        raise InvalidRequest("file: empty; expected an audio file", param="file")
    return Upload(fields, data, PurePath(file.filename or "").suffix[1:].lower())


def _fields(form: FormData) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in form.multi_items():
        name = key.removesuffix("[]")
        if key == "file":
            continue
        if isinstance(value, UploadFile):
            raise InvalidRequest(f"{name}: a file; expected a value", param=name)
        if name in LIST_FIELDS:
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise InvalidRequest(f"{name}: given twice", param=name)
        else:
            fields[name] = value
    return fields

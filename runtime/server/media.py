"""Media on their way in: base64 and uploads to the `media` payloads that stages take. The bytes are not looked
into here; decoding them, and saying what is wrong with them, is the stage's work.
"""

from __future__ import annotations

import asyncio
import binascii

import numpy as np

from runtime.errors import InvalidRequest
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, Modality, PayloadKind

SLICE_CHARS = 256 << 10
"""Base64 is decoded in slices (a multiple of four): one call holds the interpreter lock for its whole length."""
INLINE_CHARS = 64 << 10
"""Up to this many are decoded on the event loop."""


async def decode_base64(text: str, param: str) -> bytes:
    """Strict base64, off the event loop when it is long. InvalidRequest names `param`."""
    if len(text) <= INLINE_CHARS:
        return _decode(text, param)
    return await asyncio.to_thread(_decode, text, param)


def _decode(text: str, param: str) -> bytes:
    slices = (text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS))
    try:
        decoded = [binascii.a2b_base64(piece, strict_mode=True) for piece in slices]
    except (binascii.Error, ValueError) as exc:
        raise InvalidRequest(f"{param}: not base64: {exc}", param=param) from None
    if not any(decoded):
        raise InvalidRequest(f"{param}: empty; expected the base64 of a file", param=param)
    return b"".join(decoded)


def media_payload(
    request_id: str, data: bytes, *, index: int, modality: Modality, media_format: str, name: str
) -> Payload:
    """An undecoded file: tensors {"data": uint8 (size,)}, meta {"index", "modality", "format", "name"}.

    index counts over all media of a request. media_format is "" when not known; name is the client's field, for
    messages about the file.
    """
    return Payload(
        kind=PayloadKind.MEDIA,
        request_id=request_id,
        edge=REQUEST_INPUT,
        sequence=index,
        meta={"index": index, "modality": str(modality), "format": media_format, "name": name},
        tensors={"data": np.frombuffer(data, np.uint8)},
    )

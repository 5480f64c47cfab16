"""Picture files to RGB images, as a viewer would show them: turned as their EXIF says, what is transparent on white.

Knows nothing of models and of how large they want a picture. Programs whose model sees call it.
"""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np

from runtime.errors import InvalidRequest, UnsupportedMedia
from runtime.programs.loading import require_module
from runtime.programs.media.audio import FileBytes

FORMATS = ("png", "jpeg", "webp", "gif", "bmp", "tiff")
"""Nothing that is a program, as PostScript is: reading it would run it."""
ALIASES = {"jpg": "jpeg", "pjpeg": "jpeg", "x-png": "png", "apng": "png", "x-ms-bmp": "bmp", "tif": "tiff"}
MAX_ASPECT_RATIO = 200
"""What the models' preprocessing takes."""
PARAM = "image"
_WHITE = (255, 255, 255)


class ImageDecoder:
    """EnvironmentProblem when Pillow cannot be imported."""

    formats = FORMATS

    def __init__(self, stage: str) -> None:
        self._images: Any = require_module("PIL.Image", stage)
        self._operations: Any = require_module("PIL.ImageOps", stage)

    def check_format(self, name: str) -> None:
        """For the format that a client says it sends, "" if it says none: what the data is, decoding finds out."""
        name = name.lower().removeprefix("image/")
        if name and ALIASES.get(name, name) not in FORMATS:
            raise UnsupportedMedia(
                f"image format {name!r} is unknown; expected one of {', '.join(FORMATS)}", param=PARAM
            )

    def decode(self, data: FileBytes, max_pixels: int) -> Any:
        """A PIL image, mode RGB, without metadata. Its size is looked at before it is decoded.

        UnsupportedMedia when the data is no picture, is damaged or holds several; InvalidRequest when it is too large.
        """
        file = io.BytesIO(bytes(data))
        if file.getbuffer().nbytes == 0:
            raise self._undecodable("it is empty (0 bytes)")
        try:
            with self._images.open(file, formats=[name.upper() for name in FORMATS]) as image:
                self._check_size(image, max_pixels)
                image.load()
                return self._as_shown(image)
        except (self._images.DecompressionBombError, self._images.DecompressionBombWarning) as exc:
            raise self._too_large("more pixels than Pillow opens", max_pixels) from exc
        except self._images.UnidentifiedImageError as exc:
            raise self._undecodable("it is of no format that is known here") from exc
        except (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, zlib.error) as exc:
            raise self._undecodable(str(exc) or type(exc).__name__) from exc

    def _check_size(self, image: Any, max_pixels: int) -> None:
        width, height = image.size
        if width * height > max_pixels:
            raise self._too_large(f"{width} x {height} pixels", max_pixels)
        check_aspect_ratio("image", width, height, PARAM)
        if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # that is one picture and its preview
            raise self._undecodable(f"it holds {image.n_frames} pictures, not one")

    def _as_shown(self, image: Any) -> Any:
        """What carries pixels only: neither a profile nor a mark of its origin goes on to the model."""
        turned = self._operations.exif_transpose(image)
        if turned.mode in ("I", "I;16", "I;16B"):  # 16 bits of grey, which Pillow would cut off at 255
            turned = self._images.fromarray((np.asarray(turned).astype(np.int32) >> 8).clip(0, 255).astype(np.uint8))
        if turned.mode in ("RGBA", "LA", "PA") or "transparency" in turned.info:
            layer = turned.convert("RGBA")
            turned = self._images.new("RGB", layer.size, _WHITE)
            turned.paste(layer, mask=layer.getchannel("A"))
        return self._images.fromarray(np.asarray(turned.convert("RGB")))

    def _too_large(self, size: str, max_pixels: int) -> InvalidRequest:
        return InvalidRequest(
            f"the image has {size}; at most {max_pixels} are taken here", hint="send a smaller one", param=PARAM
        )

    def _undecodable(self, reason: str) -> UnsupportedMedia:
        return UnsupportedMedia(
            f"the image cannot be decoded: {reason}; expected one of {', '.join(FORMATS)}", param=PARAM
        )


def check_aspect_ratio(what: str, width: int, height: int, param: str) -> None:
    """InvalidRequest for a picture that is all length."""
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidRequest(
            f"the {what} is {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other",
            param=param,
        )

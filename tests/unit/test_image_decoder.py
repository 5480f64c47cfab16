"""Picture files as they come: every format and mode, turned ones, broken ones and bombs."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.errors import InvalidRequest, UnsupportedMedia
from runtime.programs.media.image import FORMATS, ImageDecoder

MAX_PIXELS = 1_000_000
ORIENTATION = 0x0112
TURN_RIGHT = 6


@pytest.fixture(scope="module")
def decoder() -> ImageDecoder:
    return ImageDecoder("thinker")


def picture(width: int = 12, height: int = 8) -> Image.Image:
    """Left half red, right half blue."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, : width // 2, 0] = pixels[:, width // 2 :, 2] = 255
    return Image.fromarray(pixels)


def encoded(image: Image.Image, container: str = "png", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, container, **options)
    return out.getvalue()


@pytest.mark.parametrize("container", FORMATS)
def test_formats(decoder: ImageDecoder, container: str) -> None:
    decoder.check_format(f"image/{container}")
    found = decoder.decode(encoded(picture(), container), MAX_PIXELS)
    assert found.mode == "RGB"
    assert found.size == (12, 8)
    assert np.abs(np.asarray(found).astype(int) - np.asarray(picture())).mean() < 20


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "RGB"])
def test_modes(decoder: ImageDecoder, mode: str) -> None:
    white = Image.new("RGB", (4, 4), "white").convert(mode)
    container = "jpeg" if mode in ("CMYK", "YCbCr") else "png"
    assert np.asarray(decoder.decode(encoded(white, container), MAX_PIXELS)).min() > 250


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_lies_on_white(decoder: ImageDecoder, mode: str) -> None:
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0)).convert(mode)
    assert (np.asarray(decoder.decode(encoded(clear), MAX_PIXELS)) == 255).all()


def test_a_palette_with_a_transparent_colour(decoder: ImageDecoder) -> None:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0] * 256)
    assert (np.asarray(decoder.decode(encoded(image, "gif", transparency=0), MAX_PIXELS)) == 255).all()


def test_sixteen_bits_of_grey_are_not_cut_off(decoder: ImageDecoder) -> None:
    ramp = Image.fromarray(np.full((4, 4), 0x8000, np.uint16))
    assert (np.asarray(decoder.decode(encoded(ramp), MAX_PIXELS)) == 0x80).all()


def test_turned_as_its_exif_says_and_nothing_else_of_it_kept(decoder: ImageDecoder) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = TURN_RIGHT
    found = decoder.decode(encoded(picture(), "png", exif=exif), MAX_PIXELS)
    assert found.size == (8, 12)
    assert found.getpixel((0, 0)) == (255, 0, 0)
    assert found.getpixel((0, 11)) == (0, 0, 255)
    assert not found.info
    assert not found.getexif()


def test_the_smallest_there_is(decoder: ImageDecoder) -> None:
    assert decoder.decode(encoded(picture(2, 1)), MAX_PIXELS).size == (2, 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"no picture", "of no format that is known here"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "of no format that is known here"),
        (encoded(picture(400, 300), "jpeg")[:1500], "cannot be decoded"),
        (encoded(picture(400, 300))[:-40], "cannot be decoded"),
        (encoded(picture(), "gif", save_all=True, append_images=[picture(12, 8).rotate(180)]), "it holds 2 pictures"),
    ],
)
def test_broken_ones(decoder: ImageDecoder, data: bytes, reason: str) -> None:
    with pytest.raises(UnsupportedMedia, match=reason):
        decoder.decode(data, MAX_PIXELS)


@pytest.mark.parametrize("side", [1001, 60_000])
def test_a_bomb_is_refused_by_its_header(decoder: ImageDecoder, side: int) -> None:
    """A header of any size costs its sender 50 bytes."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    with pytest.raises(InvalidRequest, match="at most 1000000 are taken here"):
        decoder.decode(b"\x89PNG\r\n\x1a\n" + chunk + encoded(picture())[33:], MAX_PIXELS)


def test_all_length(decoder: ImageDecoder) -> None:
    with pytest.raises(InvalidRequest, match="201 x 1 pixels; one side may be at most 200 times the other"):
        decoder.decode(encoded(picture(201, 1)), MAX_PIXELS)


def test_a_format_that_nobody_knows(decoder: ImageDecoder) -> None:
    with pytest.raises(UnsupportedMedia, match="image format 'heic' is unknown; expected one of png, jpeg"):
        decoder.check_format("image/heic")
    for name in ("", "jpg", "PNG", "image/jpeg", "tif"):
        decoder.check_format(name)

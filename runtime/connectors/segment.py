"""Segments: files of shared memory, as their owner makes them and as another process reads them.

A segment begins with a magic and its size. In front of each payload in it stands a header of its own: a magic,
the payload's token and its size. The owner writes it last and erases it when the memory is free again, so a
ref that is stale, damaged or foreign never passes for data. All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path

import numpy as np

from runtime.connectors.extents import Extents
from runtime.errors import ConnectorError
from runtime.messages import Ref
from runtime.payload import Packed
from runtime.sweep import MAGIC, NAME, lock_as_owner

HEADER_BYTES = 64
"""Of a segment, and of each payload: one alignment unit, so that what follows is aligned."""
_SEGMENT_HEADER = struct.Struct("<8sQ")
_PAYLOAD_HEADER = struct.Struct("<8sQQ")
_PAYLOAD_MAGIC = b"OMNIPAYL"
_PAGE_BYTES = mmap.PAGESIZE
_MODE = 0o600


class OwnedSegment:
    """A file of this process. It lives until `drop`; the memory until nobody refers to it any more."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        """ConnectorError, with the bytes needed and free, when the folder has no room or cannot be used."""
        try:
            self._mapping = _create(path, size_bytes)
        except OSError as exc:
            raise _cannot_create(path.parent, size_bytes, exc) from exc
        self._path = path
        self.name = path.name
        self.size_bytes = size_bytes
        self.extents = Extents(HEADER_BYTES, size_bytes)
        self.unused_since_s = 0.0

    def write(self, offset: int, token: int, packed: Packed) -> None:
        start = offset + HEADER_BYTES
        packed.write_into(memoryview(self._mapping)[start : start + packed.size_bytes])
        _PAYLOAD_HEADER.pack_into(self._mapping, offset, _PAYLOAD_MAGIC, token, packed.size_bytes)

    def erase(self, offset: int) -> None:
        """Make refs to the payload at this offset invalid."""
        _PAYLOAD_HEADER.pack_into(self._mapping, offset, b"", 0, 0)

    def drop(self) -> None:
        """Remove the file. Consumers that have mapped it notice by its missing name."""
        self._path.unlink(missing_ok=True)


def _create(path: Path, size_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    try:
        os.fchmod(fd, _MODE)
        if not lock_as_owner(fd):
            raise ConnectorError(f"{path} was locked by another process as soon as it was made")
        # the header comes first: whatever kills us from here on, a sweep knows the file as ours
        os.pwrite(fd, _SEGMENT_HEADER.pack(MAGIC, size_bytes), 0)
        # memory that is not reserved kills the process that touches it when the folder is full
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        _fault_in(mapping)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return mapping


def _fault_in(mapping: mmap.mmap) -> None:
    """Touch every page, so that no put pays for it.

    MAP_POPULATE would do the same, but with the interpreter lock held: half a second for 256 MiB in which no
    other stage of the process could move.
    """
    pages = np.frombuffer(mapping, np.uint8)[_PAGE_BYTES::_PAGE_BYTES]
    np.copyto(pages, 0)


def _cannot_create(folder: Path, size_bytes: int, exc: OSError) -> ConnectorError:
    try:
        space = os.statvfs(folder)
        free = f"{space.f_bavail * space.f_frsize} of {space.f_blocks * space.f_frsize} bytes are free"
    except OSError:
        free = "expected a folder of ours in memory"
    return ConnectorError(
        f"shared memory folder {folder}: a segment of {size_bytes} bytes is needed, {free}: {exc.strerror}",
        hint="enlarge it (containers: --shm-size), free it with `omnictl down`, or set OMNICTL_SHM_DIR to another",
    )


class AttachedSegment:
    """Another process's segment, mapped to be read. Views keep the mapping alive, whatever becomes of the file."""

    def __init__(self, folder: Path, name: str) -> None:
        """ConnectorError when there is no such segment or it is not as its owner made it."""
        if not NAME.fullmatch(name):
            raise ConnectorError(f"{name!r} is no name of a segment; expected one like omnictl-12-345-0a1b2c3d-1")
        self._path = folder / name
        try:
            self._mapping = _attach(self._path)
        except FileNotFoundError:
            raise ConnectorError(f"segment {self._path} is gone: its owner ended or has given it back") from None
        except OSError as exc:
            raise ConnectorError(f"segment {self._path} cannot be read: {exc.strerror}") from exc
        self.size_bytes = len(self._mapping)

    @property
    def is_dropped(self) -> bool:
        """Whether the owner has given it back, or a sweep has removed it. Names are never used twice."""
        return not os.path.exists(self._path)

    def view(self, ref: Ref) -> memoryview:
        """The bytes of a payload, read-only. ConnectorError unless exactly this payload is there."""
        start, end = ref.offset + HEADER_BYTES, ref.offset + HEADER_BYTES + ref.size_bytes
        if ref.offset < HEADER_BYTES or ref.size_bytes < 0 or end > self.size_bytes:
            raise ConnectorError(
                f"segment {self._path}: bytes {ref.offset} to {end} are not inside; it has {self.size_bytes}"
            )
        # reading beyond the end of a file that was cut would kill this process
        if (size_bytes := self._mapping.size()) < self.size_bytes:
            raise ConnectorError(f"segment {self._path} was cut to {size_bytes} bytes; expected {self.size_bytes}")
        found = _PAYLOAD_HEADER.unpack_from(self._mapping, ref.offset)
        if found != (_PAYLOAD_MAGIC, ref.token, ref.size_bytes):
            raise ConnectorError(
                f"segment {self._path}: payload {ref.token} of {ref.size_bytes} bytes is not at {ref.offset}; "
                "it was reclaimed before this get, or the segment is damaged"
            )
        return memoryview(self._mapping)[start:end]


def _attach(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) != _MODE:
            raise ConnectorError(
                f"segment {path} has mode {facts.st_mode:o} and owner {facts.st_uid}; "
                f"expected a file of mode {_MODE:o} and owner {os.geteuid()}"
            )
        header = os.pread(fd, _SEGMENT_HEADER.size, 0)
        if header != (expected := _SEGMENT_HEADER.pack(MAGIC, facts.st_size)):
            raise ConnectorError(f"segment {path} is cut or damaged: begins with {header!r}; expected {expected!r}")
        return mmap.mmap(fd, facts.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)

"""Names of shared-memory files, who owns them, and the removal of those whose owner is gone.

A file is called omnictl-<pid>-<start ticks>-<random>-<number>: the owner's pid and its start time from
/proc, so that another process which got the same pid later is not taken for the owner. Knows nothing of what
is in a file but its first bytes. Called at start-up of the server, and by `omnictl down` as
`python -P -m runtime.sweep [FOLDER]`, which prints what was removed as JSON; both also remove the
control-socket folders of dead servers.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runtime.errors import ConfigError
from runtime.settings import shm_dir

log = logging.getLogger(__name__)

MAGIC = b"OMNISEG1"
"""First bytes of every file of ours that is not empty."""
EMPTY_FILE_AGE_S = 60.0
"""An empty file is taken for one whose owner was killed while it made it once it is older than this."""
NAME = re.compile(r"omnictl-(?P<pid>[1-9]\d{0,9})-(?P<ticks>\d{1,20})-[0-9a-f]{8}-\d{1,10}")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it does not run (any more)."""
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the second field is the command in parentheses, and may hold spaces and parentheses itself
    fields = line[line.rindex(b")") + 1 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def new_arena_name() -> str:
    """Common beginning of the names of this process's files; a number follows."""
    pid = os.getpid()
    return f"omnictl-{pid}-{start_ticks(pid)}-{secrets.token_hex(4)}"


def lock_as_owner(fd: int) -> bool:
    """Lock a file for as long as `fd` or a mapping made from it lives. False when somebody else holds it.

    Taken once a file, not once a payload. It tells a live owner apart where pids do not: in containers that
    share a folder but not their process ids.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(slots=True)
class Swept:
    """What a sweep did: names and bytes of removed files, and names that it had to leave though nobody uses them."""

    removed: list[str] = field(default_factory=list)
    removed_bytes: int = 0
    failed: list[str] = field(default_factory=list)


def sweep_dead_owners(folder: Path) -> Swept:
    """Remove files of ours whose owner is gone. Never a foreign file, and never one of a live owner.

    A missing folder holds nothing to remove. ConfigError when it cannot be read.
    """
    swept = Swept()
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return swept
    except OSError as exc:
        raise ConfigError(
            f"shared memory folder {folder} cannot be read: {exc.strerror}; expected a folder",
            hint="set OMNICTL_SHM_DIR to a folder of your own in memory",
        ) from exc
    for name in names:
        if match := NAME.fullmatch(name):
            _remove_if_dead(folder / name, match, swept)
    return swept


def _remove_if_dead(path: Path, name: re.Match[str], swept: Swept) -> None:
    try:
        facts = path.lstat()
        if facts.st_uid != os.geteuid() or not stat.S_ISREG(facts.st_mode):
            return
        if start_ticks(int(name["pid"])) == int(name["ticks"]) or not _unlink_unused(path):
            return
    except FileNotFoundError:
        return
    except OSError as exc:
        log.warning("cannot remove %s, whose owner is gone: %s", path, exc.strerror)
        swept.failed.append(path.name)
        return
    swept.removed.append(path.name)
    swept.removed_bytes += facts.st_size


def _unlink_unused(path: Path) -> bool:
    """Remove a file that begins like ours and that no owner has locked."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        beginning = os.pread(fd, len(MAGIC), 0)
        # an owner in another container may be between creating its file and locking it
        is_left = beginning == MAGIC or (not beginning and time.time() - os.fstat(fd).st_mtime > EMPTY_FILE_AGE_S)
        if not is_left or not lock_as_owner(fd):
            return False
        path.unlink()
        return True
    finally:
        os.close(fd)


def sweep_dead_folders() -> list[str]:
    """Remove the control-socket folders of servers that are gone; returns their names."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob("omnictl-*"):
        name = NAME.fullmatch(folder.name)
        if name is None or start_ticks(int(name["pid"])) == int(name["ticks"]):
            continue
        facts = folder.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        sys.stderr.write("usage: python -P -m runtime.sweep [FOLDER]\n")
        return ConfigError.exit_code
    try:
        swept = sweep_dead_owners(Path(arguments[0]) if arguments else shm_dir())
    except ConfigError as exc:
        sys.stderr.write(f"{exc}\n")
        return exc.exit_code
    sys.stdout.write(json.dumps(asdict(swept) | {"folders": sweep_dead_folders()}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What is deployed on this machine, on disk: one folder a deployment below OMNICTL_STATE_DIR.

    deployments/NAME/plan.json         what the server was started with
    deployments/NAME/deployment.json   the record below, replaced atomically
    deployments/NAME/logs/*.log        server.log and one a worker process
    locks/NAME.lock                    held while a command changes the deployment

Records only; whether the process of a record lives is asked of the kernel. Starts and stops nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import msgspec

from omnictl import output, settings
from omnictl.locks import exclusive
from omnictl.processes import ProcessId
from runtime.errors import ConfigError, EnvironmentProblem, NotRunning, OmniError, Unavailable

LOCK_TIMEOUT_S = 15.0
"""Longer than a launch takes; a `down` that drains may take more, and then the next command says who is at work."""
NAME_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class State(StrEnum):
    """What the command that changed a deployment last wrote. `DEAD` and `DAMAGED` are only ever observed."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    FAILED = "failed"
    DEAD = "dead"
    DAMAGED = "damaged"


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served plan. `host` is the bind address, `url` the one to dial from this machine."""

    schema_version: int = 1
    name: str
    model: str
    model_names: tuple[str, ...]
    process: ProcessId
    host: str
    port: int
    url: str
    state: State
    started_at: str
    log_dir: str
    shm_dir: str
    api_key_file: str | None = None
    api_keys_sha256: str | None = None
    """Tells whether a second `up` asks for the same keys; the keys themselves are never written."""
    reason: str | None = None

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    @property
    def observed(self) -> State:
        """The recorded state, corrected by whether the server process lives."""
        if self.state is State.FAILED or self.is_alive:
            return self.state
        return State.DEAD


class DamagedState(EnvironmentProblem):
    """A deployment's record cannot be read. Its processes can still be found by their environment."""

    code = "damaged_state"


def check_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f"deployment name {name!r}: expected lower-case letters, digits, '.', '_' and '-', at most 63",
            hint="choose another with --name",
        )
    return name


class Store:
    """The deployments below one folder (default: the setting)."""

    def __init__(self, root: Path | None = None) -> None:
        # Absolute: the folder is also the mark by which a deployment's processes are found.
        self.root = (root or settings.state_dir()).absolute()

    def folder(self, name: str) -> Path:
        return self.root / "deployments" / check_name(name)

    def names(self) -> list[str]:
        """Every deployment with a folder, whatever is in it."""
        try:
            folders = list((self.root / "deployments").iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unusable(self.root, error) from error
        return sorted(f.name for f in folders if f.is_dir() and NAME_PATTERN.fullmatch(f.name))

    def load(self, name: str) -> Deployment:
        """Raises NotRunning when there is none, DamagedState when its record cannot be read."""
        path = self.folder(name) / "deployment.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Deployment)
        except (OSError, msgspec.MsgspecError) as error:
            if not self.folder(name).is_dir():
                raise self._unknown(name) from None
            raise DamagedState(
                f"{path}: {error}", hint=f"omnictl down {name} stops what is left of it and removes the record"
            ) from None

    def plan_json(self, name: str) -> str | None:
        """The plan's text as it was given to the server; None when it is gone."""
        try:
            return (self.folder(name) / "plan.json").read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def prepare(self, name: str, plan_json: str) -> Path:
        """An empty folder with the plan and a log folder in it. What an earlier deployment left is removed."""
        folder = self.folder(name)
        try:
            self.remove(name)
            folder.mkdir(mode=0o700, parents=True)
            (folder / "logs").mkdir(mode=0o700)
            write_atomically(folder / "plan.json", plan_json.encode())
        except OSError as error:
            raise _unusable(folder, error) from error
        return folder

    def save(self, deployment: Deployment) -> None:
        path = self.folder(deployment.name) / "deployment.json"
        try:
            write_atomically(path, msgspec.json.format(msgspec.json.encode(deployment)))
        except OSError as error:
            raise _unusable(path, error) from error

    def update(self, deployment: Deployment, state: State, reason: str | None = None) -> bool:
        """Record a new state, unless the record is by now of another run. Call with the lock held."""
        try:
            current = self.load(deployment.name)
        except OmniError:
            return False
        if current.process != deployment.process:
            return False
        self.save(msgspec.structs.replace(current, state=state, reason=reason))
        return True

    def remove(self, name: str) -> None:
        try:
            shutil.rmtree(self.folder(name))
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unusable(self.folder(name), error) from error

    def choose(self, name: str | None) -> str:
        """The named deployment, or the only one there is."""
        names = self.names()
        if name is not None:
            if check_name(name) not in names:
                raise self._unknown(name)
            return name
        if not names:
            raise NotRunning("nothing is deployed", hint="omnictl up NAME")
        if len(names) > 1:
            raise ConfigError(f"several deployments: {', '.join(names)}", hint="say which one with its name")
        return names[0]

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Held while a deployment is created, changed or removed. Unavailable when another command keeps it."""
        path = self.root / "locks" / f"{check_name(name)}.lock"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch(mode=0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        with exclusive(path, LOCK_TIMEOUT_S, output.note, Unavailable):
            yield

    def _unknown(self, name: str) -> NotRunning:
        names = self.names()
        known = f"deployed: {', '.join(names)}" if names else f"omnictl up {name}"
        return NotRunning(f"no deployment is called {name!r}", hint=known)


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, also after a power cut."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _unusable(path: Path, error: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{path}: {error.strerror or error}", hint="set OMNICTL_STATE_DIR to a folder that can be written"
    )

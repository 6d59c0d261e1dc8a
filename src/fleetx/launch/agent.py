"""torchelastic's agent, with our worker processes.

torchelastic runs the loop: rendezvous, start, monitor, restart, stop. We replace how workers are started (workers.py,
because the first ones start before torch is imported), how their exit is noticed (immediately, instead of polling ten
times a second), how long to wait for them to stop (torchelastic waits 30 s), and what is reported (report.py).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, cast

import psutil  # noqa: F401  # workers.py needs it at the first restart, which should not wait for the import
import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from fleetx.errors import LaunchError
from fleetx.launch.job import Attempt, Job
from fleetx.launch.logs import Logs
from fleetx.launch.rendezvous import FleetrunRendezvous
from fleetx.launch.report import Failure, failures_of
from fleetx.launch.workers import LocalWorkers

CHECK_EVERY = 0.1  # seconds between checks of the other nodes; the exit of a worker is noticed immediately
QUICK = 10.0  # seconds: an attempt that fails sooner is a quick failure
LONGEST = 60.0  # seconds to wait before a restart


class _NoRedirects(LogsSpecs):
    """The runner writes the logs and the error files itself, so tell torchelastic to redirect nothing."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


class _Processes(SubprocessContext):
    """Presents workers that are already running to torchelastic."""

    def __init__(self, workers: LocalWorkers):
        self._workers = workers
        ranks = range(len(workers.attempt.slots))
        super().__init__(
            name="worker",
            entrypoint=sys.executable,
            args=dict.fromkeys(ranks, ()),
            envs={rank: {} for rank in ranks},
            logs_specs=_NoRedirects(),
        )

    def _start(self) -> None:
        self.subprocess_handlers = {worker.local_rank: cast(SubprocessHandler, worker) for worker in self._workers}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Do nothing: the agent stops the workers for a restart, and start.py at the end."""


class Pace:
    """Restarts at once after the first quick failure, and waits longer after each further one in a row.

    A script that always fails at once must not restart in a tight loop.
    """

    def __init__(self, *, delay: float):
        self._delay = delay  # before the third quick attempt; doubles from there
        self.quick_failures = 0  # in a row

    def wait_after(self, life: float) -> float:
        """Seconds to wait before a restart, after an attempt that failed `life` seconds after its start."""
        self.quick_failures = self.quick_failures + 1 if life < QUICK else 0
        if self.quick_failures < 2:
            return 0.0
        return min(self._delay * 2.0 ** min(self.quick_failures - 2, 60), LONGEST)


class Agent(LocalElasticAgent):
    def __init__(
        self,
        job: Job,
        *,
        rendezvous: FleetrunRendezvous,
        logs: Logs,
        start: Callable[[Attempt], LocalWorkers],
        print_status: Callable[[str], None],
    ):
        self.failures: list[Failure] = []  # of all attempts, on this node
        self._job = job
        self._rendezvous_ = rendezvous
        self._logs = logs
        self._start = start
        self._print_status = print_status
        self._workers: LocalWorkers | None = None
        self._pace = Pace(delay=job.restart_delay)
        self._wait = 0.0  # seconds before the next start
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.workers,
            entrypoint=sys.executable,
            rdzv_handler=rendezvous,
            max_restarts=job.max_restarts,
            monitor_interval=0.001,  # `_monitor_workers` waits instead
        )
        super().__init__(spec, _NoRedirects())
        # multi_node.py checks that all nodes have the same number of workers, so torchelastic need not ask the store.
        os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec) -> list[Any]:
        spec.local_world_size = len(self._rendezvous_.attempt.slots)  # --elastic changes it
        return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        assert self._workers is not None
        resizing, self._rendezvous_.resizing = self._rendezvous_.resizing, False
        seconds = self._job.grace_period if resizing else self._job.stop_timeout
        self._workers.stop(signal.SIGTERM, seconds=seconds, tick=self._rendezvous_.tick)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._rendezvous_.attempt
        # All nodes share one restart budget, and only failures count, not nodes that come or go.
        self._remaining_restarts = self._job.max_restarts - attempt.restarts
        self._workers = self._start(attempt)
        self._pcontext = _Processes(self._workers)
        self._pcontext.start()
        return self._pcontext.pids()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._workers is not None
        self._workers.wait(CHECK_EVERY)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            self._record_failures(self._workers)
        elif result.state == WorkerState.SUCCEEDED and not self._rendezvous_.all_nodes_done():
            return RunResult(state=WorkerState.HEALTHY)  # another node may still request a restart
        return result

    def _record_failures(self, workers: LocalWorkers) -> None:
        failures = failures_of(workers, job=self._job, logs=self._logs)
        secondary = all(failure.secondary for failure in failures)
        # Training ends with 143 on all ranks once any of them was asked to stop, perhaps before this node hears of it.
        saved = all(failure.secondary or failure.exit_code == 128 + signal.SIGTERM for failure in failures)
        if saved and self._rendezvous_.members_change(wait=secondary):
            self._remaining_restarts += 1  # torchelastic will count this restart, but it is not a failure
            return
        self.failures += failures
        self._rendezvous_.add_failures(failures)
        if self._remaining_restarts > 0:
            self._wait = self._pace.wait_after(workers.life())
            number = self._job.max_restarts - self._remaining_restarts + 1
            cause = failures[0].summary() if failures else "a worker failed"
            why = f" in {self._wait:g} s: {self._pace.quick_failures} attempts in a row failed within {QUICK:g} s"
            self._print_status(f"{cause}; restart {number} of {self._job.max_restarts}{why if self._wait else ''}")

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        wait, self._wait = self._wait, 0.0
        self._rendezvous_.wait(wait)
        super()._initialize_workers(worker_group)

    def _exit_barrier(self) -> None:
        """Skip torchelastic's barrier: `all_nodes_done` replaces it."""

    def _construct_event(self, state: str, source: EventSource, *_: Any, **__: Any) -> Event:
        # Nothing reads the events, and to build one torchelastic looks up this host's name in the DNS.
        return Event(f"fleetrun.{state}", source=source)


def silence_torchelastic() -> None:
    """Disable torchelastic's log messages, unless the user configured torch's logging."""
    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        logging.disable(logging.CRITICAL)


def check_torch(job: Job) -> None:
    if job.gpus and torch.version.cuda is None and torch.version.hip is None:
        raise LaunchError(
            f"this torch ({torch.__version__}) was built for the CPU only and cannot use GPU {','.join(job.gpus)}; "
            f"add --device cpu, or install torch with GPU support"
        )

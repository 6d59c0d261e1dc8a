"""The sequence of a run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from fleetx.launch.environment import common_environment
from fleetx.launch.job import Attempt, Job
from fleetx.launch.logs import Echo, Logs
from fleetx.launch.orphan_killer import OrphanKiller
from fleetx.launch.sockets import single_node_attempt
from fleetx.launch.warm import ForkServer
from fleetx.launch.workers import LocalWorkers, adopt_orphans

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class StopRequested(BaseException):
    """A signal asked fleetrun to stop while torchelastic was not handling signals."""

    def __init__(self, sigval: signal.Signals):
        self.sigval = sigval


def print_status(text: str) -> None:
    print(f"fleetrun: {text}", file=sys.stderr, flush=True)


def run(job: Job, *, logs: Logs) -> int:
    """Start everything, wait, clean up. Returns the exit code."""
    killer = OrphanKiller()
    adopt_orphans()
    try:
        return Launch(job, logs=logs, killer=killer).run()
    finally:
        killer.dismiss()


class Launch:
    def __init__(self, job: Job, *, logs: Logs, killer: OrphanKiller):
        self.job = job
        self.logs = logs
        self.environ = dict(os.environ)  # for the workers, before we change our own for torch
        self.killer = killer
        self.workers: LocalWorkers | None = None
        self.server: ForkServer | None = None
        self.helpers = {killer.pid}
        self.asked: list[signal.Signals] = []  # stop signals received while torchelastic was not handling them

    def run(self) -> int:
        _raise_on_signals(self.asked)
        echo = None
        try:
            print_status(self._banner())
            if not self.job.single_node and not self.job.secret:
                print_status(
                    "no job secret: anyone who can reach --master can join or stop this job; see --secret_file"
                )
            echo = Echo(self.logs.path(0))
            code, message = self._run_agent()
            echo.stop()  # copy everything, however slow the terminal; Ctrl-C can still interrupt this
        except BaseException as error:
            sigval = self._signal_behind(error)
            if sigval is None:
                raise
            self._stop(sigval)
            code, message = 128 + sigval, f"fleetrun: stopped by {sigval.name}{self._how_workers_ended()}"
        finally:
            for name in _STOP_SIGNALS:
                signal.signal(name, signal.SIG_IGN)  # the rest is short and must not be interrupted
            if self.workers and self.workers.alive():
                self.workers.kill()
            if self.server:
                self.server.end()
            if echo:
                echo.stop(seconds=5)
        if message:
            print(message, file=sys.stderr, flush=True)
        return code

    def start(self, attempt: Attempt) -> LocalWorkers:
        """Start the workers of an attempt. On a single node, those of the first attempt are already running."""
        if self.workers is None or self.workers.attempt != attempt:
            self.workers = LocalWorkers(
                job=self.job,
                attempt=attempt,
                logs=self.logs,
                killer=self.killer,
                environ=self.environ,
                helpers=self.helpers,
                server=self.server,
            )
            self.workers.start()
            self._prepare_restart()
        return self.workers

    def _prepare_restart(self) -> None:
        """Start the fork server, after the first workers, so that it does not delay them."""
        job, server = self.job, self.server
        if not job.warm or (server and (server.alive() or server.refusal)):
            return
        # In /proc, forked workers and their children show this environment too, so it must carry the mark.
        environ = {**common_environment(job, environ=self.environ), **self.killer.mark("fork_server")}
        self.server = ForkServer(environ=environ, modules=job.preload)
        self.helpers.add(self.server.pid)
        self.killer.register([self.server.pid])

    def _stop(
        self, sigval: signal.Signals, *, seconds: int | None = None, tick: Callable[[], None] = lambda: None
    ) -> None:
        """Stop the workers: within --grace_period after SIGTERM, else --stop_timeout. A second signal kills them."""
        job = self.job
        if seconds is None:
            seconds = job.grace_period if sigval == signal.SIGTERM else job.stop_timeout
        try:
            if self.workers:
                self.workers.stop(sigval, seconds=seconds, tick=tick)
        except BaseException as error:
            if not hasattr(error, "sigval"):
                raise

    def _signal_behind(self, error: BaseException) -> signal.Signals | None:
        """The signal that led to `error`, even if an import turned it into another exception, as numpy's does."""
        sigval: signal.Signals | None = getattr(error, "sigval", None)
        return sigval or next(iter(self.asked), None)

    def _how_workers_ended(self) -> str:
        count = self.workers.killed if self.workers else 0
        return f"; {count} worker{'s' if count > 1 else ''} did not exit in time and had to be killed" if count else ""

    def _run_agent(self) -> tuple[int, str]:
        """(exit code, message to print at the end)"""
        job = self.job
        if job.single_node:
            attempt, listener = single_node_attempt(tuple(range(job.workers)))
            # Importing torch takes seconds, and the workers need not wait for it: if one connects to the store before
            # the store is up, the connection waits in the socket's queue.
            self.start(attempt)
        # For this process only: the workers get the original environment.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from fleetx.launch.agent import Agent, check_torch, silence_torchelastic
        from fleetx.launch.multi_node import JobFinishedError, MultiNodeRendezvous, NodeFailedError
        from fleetx.launch.rendezvous import FleetrunRendezvous, SingleNodeRendezvous
        from fleetx.launch.report import failure_report, first_cause_first

        if self.asked:  # an import can swallow the exception of a signal: one raised in a destructor is only printed
            raise StopRequested(self.asked[0])
        silence_torchelastic()
        check_torch(job)
        cluster = None if job.single_node else MultiNodeRendezvous(job, print_status=print_status)
        rendezvous: FleetrunRendezvous = cluster or SingleNodeRendezvous(
            job, attempt=attempt, listener=listener, print_status=print_status
        )
        agent = Agent(job, rendezvous=rendezvous, logs=self.logs, start=self.start, print_status=print_status)
        stopped_by: NodeFailedError | None = None
        try:
            failed = agent.run().is_failed()
        except NodeFailedError as error:
            failed, stopped_by = True, error
            # If a signal stopped the other node, all workers get the grace period, to save their state together.
            self._stop(signal.SIGTERM, seconds=None if error.signal else job.stop_timeout, tick=rendezvous.tick)
        except JobFinishedError:
            rendezvous.leave(failed=False)
            return 0, "fleetrun: the job finished before this node was needed"
        except BaseException as error:
            sigval = self._signal_behind(error)
            if cluster and sigval:
                cluster.depart(f"stopped by {sigval.name}", signal=int(sigval))
            elif cluster:
                cluster.abort(str(error))
            seconds = None if sigval else job.stop_timeout
            self._stop(sigval or signal.SIGTERM, seconds=seconds, tick=rendezvous.tick)
            rendezvous.leave(failed=False)
            raise
        if failed and not stopped_by and cluster:
            cluster.abort("a worker failed")
        failures = agent.failures + rendezvous.leave(failed=failed)
        if not failed:
            return 0, ""
        if stopped_by and stopped_by.signal:
            return 128 + stopped_by.signal, f"fleetrun: stopped because another node was: {stopped_by}"
        if failures:
            return 1, failure_report(first_cause_first(failures), job=job)
        return 1, f"fleetrun: stopped because another node stopped: {stopped_by}"

    def _banner(self) -> str:
        job = self.job
        size = job.workers * job.nodes
        text = f"{size} worker{'s' if size > 1 else ''} on {job.device}"
        if job.gpus:
            text += f" {','.join(job.gpus)}"
        if not job.single_node:
            text += f", node {job.rank} of {job.nodes}"
        if job.elastic:
            text += f", at least {job.elastic}{'' if job.single_node else ' nodes'}"
        if job.threads:
            text += f", {job.threads} thread{'s' if job.threads > 1 else ''} each (OMP_NUM_THREADS)"
        return f"{text}, logs in {self.logs.directory}/workerlog.*"


def _raise_on_signals(asked: list[signal.Signals]) -> None:
    """Note stop signals and raise StopRequested, until torchelastic handles them. Under nohup, both ignore SIGHUP."""

    def stop(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number))
        raise StopRequested(asked[-1])

    sighup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = [name for name in _STOP_SIGNALS if not (name is signal.SIGHUP and sighup_ignored)]
    for name in handled:
        signal.signal(name, stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(name.name for name in handled)

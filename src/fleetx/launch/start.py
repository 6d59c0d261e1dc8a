"""The order of a run."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from fleetx.launch.job import Job, World
from fleetx.launch.logs import Echo, Logs
from fleetx.launch.orphan_killer import Guard
from fleetx.launch.sockets import world_of_one_node
from fleetx.launch.workers import Crew, adopt_orphans

_DEADLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Stopped(BaseException):
    """A signal asks fleetrun to end, at a moment when torchelastic is not there to hear it."""

    def __init__(self, sigval: signal.Signals):
        self.sigval = sigval


def say(text: str) -> None:
    print(f"fleetrun: {text}", file=sys.stderr, flush=True)


def run(job: Job, *, logs: Logs) -> int:
    """Start everything, wait, tidy up; returns the exit code."""
    errors = Path(tempfile.mkdtemp(prefix="fleetrun-"))
    guard = Guard(str(errors))
    adopt_orphans()
    try:
        return Launch(job, logs=logs, errors=errors, guard=guard).run()
    finally:
        guard.dismiss()
        shutil.rmtree(errors, ignore_errors=True)


class Launch:
    def __init__(self, job: Job, *, logs: Logs, errors: Path, guard: Guard):
        self.job = job
        self.logs = logs
        self.given = dict(os.environ)  # before we tune our own for torch
        self.errors = errors
        self.guard = guard
        self.crew: Crew | None = None

    def run(self) -> int:
        _raise_on_signals()
        echo = None
        try:
            say(self._banner())
            echo = Echo(self.logs.path(0))
            code, last_words = self._attempts()
            echo.stop()  # all of it, however slow the terminal; Ctrl-C is still heard
        except BaseException as error:
            sigval = getattr(error, "sigval", None)  # of Stopped, or of torchelastic's SignalException
            if sigval is None:
                raise
            self._stop(sigval)
            code, last_words = 128 + sigval, f"fleetrun: stopped by {sigval.name}"
        finally:
            for name in _DEADLY:
                signal.signal(name, signal.SIG_IGN)  # what follows is short, and must not stop halfway
            if self.crew and self.crew.alive():
                self.crew.kill()
            if echo:
                echo.stop(seconds=5)
        if last_words:
            print(last_words, file=sys.stderr, flush=True)
        return code

    def start(self, world: World) -> Crew:
        """The workers of one attempt; those of the first attempt on one node are running already."""
        if self.crew is None or self.crew.world != world:
            self.crew = Crew(
                self.job, world=world, logs=self.logs, errors=self.errors, guard=self.guard, given=self.given
            )
            self.crew.start()
        return self.crew

    def _stop(self, sigval: signal.Signals) -> None:
        """As gently as --stop_timeout allows; a second signal means now."""
        try:
            if self.crew:
                self.crew.stop(sigval, seconds=self.job.stop_timeout)
        except BaseException as error:
            if not hasattr(error, "sigval"):
                raise

    def _attempts(self) -> tuple[int, str]:
        """(exit code, what to say at the end)"""
        job = self.job
        if job.alone:
            world, listener = world_of_one_node(job, attempt=0, run_id=os.urandom(6).hex())
            # The import of torch below takes seconds. The workers need not wait for it: who asks for the store before
            # it answers stands in the queue of its socket.
            self.start(world)
        # For our own process only: the workers have the environment as it was given.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from fleetx.launch.agent import Agent, check_torch, quiet
        from fleetx.launch.multi_node import Meeting, NodeFailedError
        from fleetx.launch.rendezvous import OneNode, Rendezvous
        from fleetx.launch.report import in_order, message

        quiet()
        check_torch(job)
        meeting = None if job.alone else Meeting(job, say=say)
        rendezvous: Rendezvous = meeting or OneNode(job, world=world, listener=listener)
        agent = Agent(job, rendezvous=rendezvous, logs=self.logs, start=self.start, say=say)
        reason = ""
        try:
            failed = agent.run().is_failed()
        except NodeFailedError as error:
            failed, reason = True, str(error)
        except BaseException as error:
            if meeting:
                sigval = getattr(error, "sigval", None)
                meeting.give_up(f"stopped by {sigval.name}" if sigval else str(error))
                meeting.leave(failed=False)
            raise
        failures = agent.failures
        if meeting:
            if failed and not reason:
                meeting.give_up("a worker failed")
            failures = failures + meeting.leave(failed=failed)
        if not failed:
            return 0, ""
        if failures:
            return 1, message(in_order(failures), job=job)
        return 1, f"fleetrun: stopped, because another node gave up: {reason}"

    def _banner(self) -> str:
        job = self.job
        size = job.workers * job.nodes
        what = f"{size} worker{'s' if size > 1 else ''} on {job.device}"
        if job.gpus:
            what += f" {','.join(job.gpus)}"
        nodes = "" if job.alone else f", node {job.rank} of {job.nodes}"
        threads = (
            f", {job.threads} thread{'s' if job.threads > 1 else ''} each (OMP_NUM_THREADS)" if job.threads else ""
        )
        return f"{what}{nodes}{threads}, logs in {self.logs.directory}/workerlog.*"


def _raise_on_signals() -> None:
    """Until torchelastic takes over. Under nohup the end of the terminal stays ignored, by torchelastic as well."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(signal.Signals(number))

    hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [name for name in _DEADLY if not (name is signal.SIGHUP and hangup_ignored)]
    for name in heard:
        signal.signal(name, stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(name.name for name in heard)

"""Lab: hosts on a network of a set bandwidth.

    host 0, eth0 10.77.0.1 >--tbf--     --tbf--< port0 |
    host 1, eth0 10.77.0.2 >--tbf--     --tbf--< port1 | bridge "switch", in a namespace of its own

Each cable is a veth pair, shaped at both ends, so that a host can neither send nor receive faster than the rate.
Workers of one host talk through its loopback, at full speed. There is no delay: that would need netem.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

from benchmarks.frame import CannotRunError
from benchmarks.netlab import counters, link, namespaces, signals
from benchmarks.netlab.counters import INTERFACE, Counters
from benchmarks.netlab.namespaces import tool

ROOT = Path(__file__).parents[2]
SUBNET = "10.77.0.0/24"
MOST_HOSTS = 64
SECONDS = 120.0  # for what runs in a lab, unless said otherwise
_LAST_WORDS = 2000
_LOOK_SECONDS = 0.05

Finished = subprocess.CompletedProcess[str]


class LabError(RuntimeError):
    """A command in the lab failed or took too long; the message has the end of its output."""


class Lab:
    """The network exists within `with`. At its end, the network is removed and everything that ran in it is stopped."""

    def __init__(self, *, hosts: int = 2, rate: str | None = "100mbit"):
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(f"hosts = {hosts}: must be from 1 to {MOST_HOSTS}")
        self._shaper = link.shaper(rate) if rate else None  # without a rate, as fast as the machine
        self.hosts = hosts
        self.rate = rate
        self.bits = link.bits(rate) if rate else None
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]  # the same in each lab: they do not meet
        self._family = ""
        self._open = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[Any]] = []

    # ------------------------------------------------------------------ making and removing

    def __enter__(self) -> Self:
        if reason := namespaces.missing():
            raise CannotRunError(reason)
        with contextlib.ExitStack() as stack:  # until it stands, whatever goes wrong removes it
            stack.enter_context(signals.heard())
            namespaces.remove(namespaces.stale())
            self._family = namespaces.new_family()
            stack.callback(self._remove)
            self._make()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def _make(self) -> None:
        switch = self._family + "switch"
        tool("ip", "netns", "add", switch, need="network namespaces")
        tool("ip", "-n", switch, "link", "add", "switch", "type", "bridge", need="bridge")
        tool("ip", "-n", switch, "link", "set", "switch", "up", need="bridge")
        for host, address in enumerate(self.addresses):
            name, port = self.name(host), f"port{host}"
            tool("ip", "netns", "add", name, need="network namespaces")
            cable = ["type", "veth", "peer", "name", port, "netns", switch]
            tool("ip", "link", "add", INTERFACE, "netns", name, *cable, need="veth")
            for where, interface in ((switch, port), (name, INTERFACE)):
                # Without addresses, IPv6 sends no packets of its own, which would be counted.
                tool("ip", "-n", where, "link", "set", interface, "addrgenmode", "none", need="veth")
                if self._shaper:
                    tool("tc", "-n", where, "qdisc", "add", "dev", interface, "root", *self._shaper, need="tbf")
            tool("ip", "-n", switch, "link", "set", port, "master", "switch", "up", need="bridge")
            tool("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE, need="veth")
            tool("ip", "-n", name, "link", "set", INTERFACE, "up", need="veth")
            tool("ip", "-n", name, "link", "set", "lo", "up", need="loopback")
            # The same on every machine. One whose default is bbr lost 6 % when both directions were busy.
            route = [SUBNET, "dev", INTERFACE, "src", address, "congctl", "reno"]
            tool("ip", "-n", name, "route", "replace", *route, need="choice of TCP's congestion control")

    def _remove(self) -> None:
        with signals.postponed():
            for process in self._processes:  # first: one that has not entered its host yet is not found there
                _end(process)
            namespaces.remove(namespaces.of_family(self._family))

    def name(self, host: int) -> str:
        """Of the namespace of a host, for `ip -n` and `ip netns`."""
        return f"{self._family}host{range(self.hosts)[host]}"

    # ------------------------------------------------------------------ what happens in it

    def bytes(self, host: int) -> Counters:
        """What has gone through the interface of a host so far."""
        words = ["ip", "netns", "exec", self.name(host), "cat", *map(str, counters.FILES)]
        return counters.parsed(tool(*words, need="way into a namespace").split())

    def popen(
        self, host: int, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on a host; `env` is added to our own variables. It is killed with the lab, if not before."""
        words = ["ip", "netns", "exec", self.name(host), *command]
        variables = {**self._variables(host), **(env or {})}
        # In a new session, so that its children can be killed with it, and Ctrl-C reaches only the lab.
        process = subprocess.Popen(words, env=variables, start_new_session=True, **options)
        self._processes.append(process)
        return process

    def run(self, host: int, command: Sequence[str], **options: Any) -> Finished:
        """Run a command on one host and wait for it; options as for `everywhere`."""
        return self._all({host: command}, **options)[0]

    def everywhere(self, command: Sequence[str], **options: Any) -> list[Finished]:
        """Run a command on every host at once and wait for all; with what they wrote, in the order of the hosts.

        env, cwd: as usual, `env` is added to our own. timeout: in seconds. check=False: failures are returned too.
        capture=False: what they write goes where ours goes.
        """
        return self._all(dict.fromkeys(range(self.hosts), command), **options)

    def fleetrun(
        self,
        script: str | Path,
        arguments: Sequence[str] = (),
        *,
        nproc_per_node: int = 1,
        options: Sequence[str] = (),
        **others: Any,
    ) -> list[Finished]:
        """`fleetrun --ips ...` on every host, on the CPU; `options` are fleetrun's own, others as for `everywhere`."""
        words = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--ips", ",".join(self.addresses)]
        words += ["--nproc_per_node", str(nproc_per_node)]
        with tempfile.TemporaryDirectory(prefix="netlab-log-") as logs:
            return self.everywhere([*words, "--log_dir", logs, *options, str(script), *arguments], **others)

    def _variables(self, host: int) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Whoever chose an interface chose one of this machine, and the hosts have others.
        ours = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        lab = {"NETLAB_HOST": str(host), "NETLAB_IPS": ",".join(self.addresses)}
        return ours | lab | {"PATH": namespaces.PATH, "PYTHONPATH": path}

    def _all(
        self,
        commands: Mapping[int, Sequence[str]],
        *,
        timeout: float | None = SECONDS,
        check: bool = True,
        capture: bool = True,
        **options: Any,
    ) -> list[Finished]:
        with contextlib.ExitStack() as stack:
            running = []
            for host, command in commands.items():
                files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]  # a pipe could fill
                streams: dict[str, Any] = {"stdout": files[0], "stderr": files[1]} if capture else {}
                process = self.popen(host, command, stdin=subprocess.DEVNULL, **streams, **options)
                stack.callback(_end, process)
                running.append((host, command, process, files))
            late = _wait([process for _, _, process, _ in running], seconds=timeout)
            finished = []
            for host, command, process, files in running:
                if process in late:
                    _end(process)
                done = Finished(command, process.wait(), *map(_text, files))
                finished.append(done)
                if process in late or (check and done.returncode):
                    how = f"took longer than {timeout:g} s" if process in late else f"ended with {done.returncode}"
                    words = (done.stdout + done.stderr)[-_LAST_WORDS:]
                    raise LabError(f"on host {host}, `{' '.join(command)}` {how}:\n{words}")
            return finished


def _wait(processes: Sequence[subprocess.Popen[Any]], *, seconds: float | None) -> list[subprocess.Popen[Any]]:
    """Until all have ended; those that had not in time."""
    deadline = float("inf") if seconds is None else time.monotonic() + seconds
    while (alive := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
    return alive


def _end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers of a fleetrun follow it: its guard sees to that
        process.wait()


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


@cache
def allowed() -> str:
    """Why there can be no lab here; empty if there can."""
    try:
        with Lab(hosts=1, rate="1gbit") as lab:
            lab.run(0, ["true"])  # going in needs a mount, which some containers refuse
    except (CannotRunError, LabError) as error:
        return str(error)
    return ""

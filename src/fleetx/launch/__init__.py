"""fleetrun: start one training script on many workers, watch them, and say what went wrong first.

The way of a run, a file a step:

    options.py      the command line -> Job, or one line that says what is wrong        no torch up to here
    command.py      what --help says, and why some options of its relatives are refused
    devices.py      which GPUs there are, which of them are meant
    nodes.py        which of the machines in --ips this one is
    job.py          Job: everything that was asked for; World: what the workers of one attempt are told
    start.py        the order of a run: logs, first workers, agent, report
    environment.py  the variables of a worker: torch's, Paddle's, ours
    workers.py      the processes of one attempt: start, watch, stop, kill all that is left
    runner.py       what a worker starts in: its log, its parent, its last exception    (stdlib only)
    guard.py        the small process that outlives a `kill -9` of fleetrun by a moment
    logs.py         workerlog.N, and the echo of worker 0
    sockets.py      listening sockets, bound to one address each
    rendezvous.py   a fresh store for every attempt, on one node
    meeting.py      the same across nodes, and what they tell each other
    voice.py        calls to another machine, of which nobody knows whether they return
    agent.py        torchelastic's agent: restarts, and the end of all when one fails
    report.py       the first cause
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `fleetrun`; returns its exit code."""
    from fleetx.launch.options import main as run

    return run(arguments)

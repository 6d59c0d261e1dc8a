"""fleetrun: start a training script in many workers, watch them, and report what failed first.

The files, in the order of a run:

    options.py        the command line -> Job, or a one-line error
    help.py           the text of --help, and why some options of other launchers are not supported
    schedulers.py     options from the environment that a scheduler sets
    devices.py        which GPUs this machine has, and which to use
    nodes.py          which of the machines in --ips this one is
    job.py            Job: the checked command line; Attempt: what the workers of one attempt share
    start.py          the sequence of a run: logs, first workers, agent, report
    environment.py    the environment variables of a worker: torch's, Paddle's and our own
    workers.py        the processes of one attempt: start, watch, stop, kill their descendants
    runner.py         the entry point of a worker: its log, its parent, its exception (standard library only)
    warm.py           the fork server, from fleetrun's side
    fork_server.py    a process that has imported torch and forks the workers of a restart
    orphan_killer.py  a small process that cleans up if fleetrun is killed with `kill -9`
    logs.py           workerlog.N, and the echo of worker 0
    sockets.py        listening sockets, each bound to one address
    rendezvous.py     a fresh store for every attempt, on a single node
    multi_node.py     the same for several nodes
    meeting.py        what several nodes agree on; node 0 keeps it
    meeting_ends.py   the meeting on the network: node 0 serves, the other nodes call
    frames.py         the wire protocol of the meeting, authenticated with the job secret
    secret.py         where the job secret comes from
    agent.py          torchelastic's agent: restarts all workers, and decides how soon, or stops them, when one fails
    report.py         what failed first
    doctor.py         `fleetx doctor`, which is not part of a run

Only agent.py, rendezvous.py and multi_node.py import torch (devices.py does on AMD GPUs), so a wrong command line is
reported, and the first workers of a single node start, before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `fleetrun` and return its exit code."""
    from fleetx.launch.options import main as run

    return run(arguments)

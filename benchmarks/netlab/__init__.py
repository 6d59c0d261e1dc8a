"""A slow network on one machine, to test and to measure on: python -m benchmarks.netlab --help

Hosts are network namespaces, each with an address of its own and an interface `eth0`, joined by a bridge in one more
namespace; the machine's own network is never touched. Linux, root and Debian's iproute2 are needed.

    with Lab(hosts=2, rate="100mbit") as lab:
        lab.addresses                             # ["10.77.0.1", "10.77.0.2"]
        lab.run(0, ["ping", "-c1", lab.addresses[1]])
        lab.fleetrun("train.py", nproc_per_node=2)  # fleetrun --ips 10.77.0.1,10.77.0.2 on every host
        lab.bytes(0)                              # Counters(sent=..., received=...)

lab.py         Lab: makes the network, runs things in it, removes it; allowed(): why it cannot be made here
link.py        a rate, and how the shaper is set for it
namespaces.py  names that tell whose they are; what was left by a lab that was killed is found by them
signals.py     an end by SIGTERM is an end with tidying up
counters.py    the bytes that went through an interface
measured.py    what a test of the link gives
transfer.py    how fast the link is, with plain sockets
reduce.py      the same with an all-reduce of gloo, started by fleetrun
"""

from benchmarks.netlab.counters import Counters
from benchmarks.netlab.lab import Lab, LabError, allowed

__all__ = ["Counters", "Lab", "LabError", "allowed"]

"""Messages about a rank that is lost, late or gone: which one, where, doing what, for how long, what to check."""

from __future__ import annotations

import re
from typing import Any

from fleetx.comm.hub import SILENT
from fleetx.comm.world import listed
from fleetx.errors import FleetxError

# What torch's errors say if a peer is gone. Any other error is this rank's own.
_NETWORK = re.compile(
    r"gloo|nccl|Connection (closed|reset|refused)|Broken pipe|Timed out|timed out|remote process exited|TCPStore|"
    r"Socket|wait timeout|pair closure",
)
_TIMEOUT = re.compile(r"[Tt]imed out|wait timeout")


def is_network(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and not isinstance(error, FleetxError) and bool(_NETWORK.search(str(error)))


def is_timeout(error: BaseException) -> bool:
    return bool(_TIMEOUT.search(str(error)))


def saw(error: BaseException) -> str:
    """torch's message, without its source locations and general advice."""
    text = re.sub(r"^(\[[^\]]*\] )+", "", str(error).strip().splitlines()[0])
    return text.partition(". ")[0]


def lost(verdict: dict[str, Any], here: int) -> str:
    """Why this rank cannot continue. `verdict` comes from the watcher of rank 0."""
    who = f"rank {verdict['rank']} on {verdict['host']}"
    doing = place(verdict)
    then = f" {doing}" if doing else ""
    seconds = f"{verdict['for']:.1f} s"
    text = {
        "killed": (
            f"{who} was killed or crashed{then}. "
            + (
                "The kernel has just killed a process for lack of memory: use smaller batches, or fewer ranks per host"
                if verdict.get("memory")
                else "Look at the end of its log, and at `dmesg` on that host: it may have run out of memory"
            )
        ),
        "raised": f"{who} raised {verdict.get('text')}{then}. Its log has the traceback: fix that first",
        "gave up": f"{who} gave up{then}: {verdict.get('text')}",
        "stopped": (
            f"{who} was stopped by a signal (SIGSTOP, Ctrl-Z or a debugger){then}, and stood still for {seconds}. "
            "Start the job again; if you have to stop a rank, resume it within 4 s (`kill -CONT`)"
        ),
        "silent": (
            f"{who} has not answered for {verdict.get('silent', SILENT):.1f} s; it was {doing or 'not heard of before'}"
            f". Its machine is frozen or down, or the network is cut: try `ping {verdict['host']}` and `fleetx doctor`"
        ),
        "vanished": (
            f"{who} and its watcher ended together{then}. Was the job cancelled there, or the machine switched off? "
            "Look at the end of its log"
        ),
    }[verdict["how"]]
    return f"rank {here} cannot continue: {text}"


def place(found: dict[str, Any]) -> str:
    """`in backward of step 18 (train.py:12)`."""
    if found.get("doing") is None:
        return ""
    doing = f"in {found['doing']} of step {found['steps'] + 1}" if found["doing"] else f"after step {found['steps']}"
    return f"{doing} ({found['at']})" if found.get("at") else doing


def late(waiting: dict[str, Any], *, here: int, doing: str) -> str:
    """A rank is alive, but keeps the others waiting."""
    host = waiting["host"]
    who = f"{listed(waiting['late'])} ({host})" if len(waiting["late"]) > 1 else f"rank {waiting['rank']} on {host}"
    seconds, where = f"{waiting['seconds']:.0f} s", place(waiting)
    if here in waiting["late"]:
        return f"the other ranks have been waiting {seconds} for {who}, which is {where}"
    during = f" {doing}" if doing else ""
    return f"rank {here} has been waiting {seconds}{during} for {who}, which is alive, {where}"


def standstill(places: list[dict[str, Any]], seconds: float) -> str:
    """All ranks are alive, but none makes progress."""
    who = "; ".join(f"rank {found['rank']} on {found['host']} is {place(found)}" for found in places)
    return (
        f"no rank has moved for {seconds:.0f} s: {who}. None is computing, and nothing is on the network, so they are "
        "waiting for each other. Do all ranks make the same calls in the same order? FLEETX_DEBUG=collectives compares "
        "them"
    )


def unexplained(doing: str, *, here: int, timeout: bool) -> str:
    """The network failed, although every rank is alive."""
    where = f" in {doing}" if doing else ""
    if timeout:
        return (
            f"rank {here} waited too long{where}, but no rank is lost, and none is behind the others. Do all ranks "
            "make the same calls in the same order? FLEETX_DEBUG=collectives compares them"
        )
    return (
        f"rank {here} lost a connection to another rank{where}, but no rank is lost. Was the network interrupted, or a "
        "process group destroyed on one rank? `fleetx doctor` checks the network"
    )


def ended(left: dict[int, int], *, here: int, updates: int) -> str:
    """Ranks whose script ended normally while others continue."""
    who = ", ".join(f"rank {rank} after {after} updates" for rank, after in sorted(left.items()))
    return (
        f"the script had already ended on {who}, while rank {here} continued after {updates}. If the "
        "ranks have different numbers of batches, `for batch in fleet.join(loader)` stops all of them together"
    )


def add_hint(error: BaseException) -> None:
    """Explain torch's error about shards where fleetx could not raise its own, because the model was not called."""
    said = any("fleetx" in note for note in getattr(error, "__notes__", ()))
    if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error) and not said:
        error.add_note(
            "fleetx: under sharding, parameters are whole only inside model(x): call the model, not one of its "
            "modules. For another method, call torch.distributed.fsdp.register_fsdp_forward_method(model, 'method') "
            "after fleet.distribute"
        )

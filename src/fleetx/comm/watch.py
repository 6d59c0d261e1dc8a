"""This rank's side of its watcher (`watcher.py`): starts it, shows it where the training is, and hears its findings.

There is one per process group and process. It lives until Python exits, so that models can come and go.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fleetx.base import seams
from fleetx.base.user_line import user_frame
from fleetx.comm import alarm, hub_address, kernel
from fleetx.comm.json_socket import JsonSocket
from fleetx.comm.watcher import LAST, PLACE
from fleetx.comm.world import World
from fleetx.errors import WorldError

GRACE = 5.0  # seconds that the main thread has to raise an error after its connections were cut
OWN_GRACE = 0.5  # the same on the lost rank itself, if it was stopped and runs again: gloo may wait forever there
SWITCH = "FLEETX_WATCH"
_PROGRAM = Path(__file__).with_name("watcher.py")
_TORCH, _FLEETX = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_NEVER = 1 << 62  # counts as the answer to every question: there is no hub any more


class Watch:
    """The watcher of this rank."""

    def __init__(self, world: World):
        self.rank, self._size, self._world = world.rank, world.size, world
        self.store = seams.default_store()
        self.verdict: dict[str, Any] | None = None  # the rank that was lost
        self.waiting: dict[str, Any] | None = None  # the rank that was last reported as late
        self.left: dict[int, int] = {}  # rank -> updates, of the ranks that ended normally
        self.table: dict[int, int] = {}  # rank -> progress, the last answer to `ask`
        self.told = threading.Event()  # set when an error about the verdict is on its way
        self.ended = False  # has this rank said how it ends?
        self._arrived = threading.Condition()
        self._questions, self._answered = 0, 0  # numbers of the last question "is a rank lost?", and of the last answer
        self.doing = ""
        self._main = threading.main_thread()
        start, listener = hub_address.find(world, self.store)
        with tempfile.TemporaryFile() as file, listener or contextlib.nullcontext():
            file.truncate(PLACE.size)
            self._memory = mmap.mmap(file.fileno(), PLACE.size)
            self.mark(0, 0, "")
            ours, theirs = socket.socketpair()
            files = [theirs.fileno(), file.fileno(), *([listener.fileno()] if listener is not None else [])]
            self._lines = JsonSocket(ours)
            self._lines.send(start)  # before the watcher runs, so that it has this even if this process dies at once
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), *map(str, files)],
                pass_fds=files, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        theirs.close()
        ours.settimeout(None)
        self._thread = threading.Thread(target=self._run, name="fleetx-heartbeat", daemon=True)
        self._thread.start()

    # --- what the rank says -----------------------------------------------------------------------
    def mark(self, progress: int, steps: int, doing: str) -> None:
        """Show where the training is. Takes a microsecond."""
        self.doing = doing
        PLACE.pack_into(self._memory, 0, progress, steps, time.monotonic(), doing.encode()[:32])

    def say(self, message: dict[str, Any]) -> None:
        self.ended = self.ended or bool(LAST & message.keys())
        self._lines.send(message)

    def ask(self, seconds: float) -> bool:
        """Ask whether a rank is lost. True if there is an answer: a verdict, or a reply from every other rank."""
        with self._arrived:
            self._questions += 1
        question = self._questions
        if self.verdict is None:
            self._lines.send({"doubt": question})
        with self._arrived:
            return self._arrived.wait_for(lambda: self.verdict is not None or self._answered >= question, seconds)

    def close(self) -> None:
        """End the watcher, before Python exits."""
        if not self.ended:
            self.say({"left": 0})
        with contextlib.suppress(OSError):
            self._lines.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=2.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2.0)

    def explained(self) -> str:
        """The error message about the lost rank."""
        assert self.verdict is not None
        self.told.set()
        if self.verdict["how"] == "unwatched":
            return str(self.verdict["text"])
        return alarm.lost(self.verdict, self.rank)

    # --- what it hears ----------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            while (messages := self._lines.read()) is not None:
                for message in messages:
                    self._hear(message)
            self._hear({"nobody": None})
        except Exception as error:
            if not self.ended:
                self._judge({"how": "unwatched", "rank": -1, "text": f"no heartbeat on rank {self.rank}: {error}"})

    def _hear(self, message: dict[str, Any]) -> None:
        if "verdict" in message:
            self._judge(message["verdict"])
        elif "waiting" in message:
            self.waiting = message["waiting"]
            self._warn(alarm.late(self.waiting, here=self.rank, doing=f"in {self.doing}" if self.doing else ""))
        elif "standstill" in message:
            self._warn(alarm.standstill(message["standstill"], message["seconds"]))
        elif "left" in message:
            with self._arrived:
                self.left[message["left"]] = message["updates"]
                self._arrived.notify_all()
        elif "answer" in message:
            self._lines.send({"here": message["answer"]})
        elif "nobody" in message:
            with self._arrived:
                self.waiting = message.get("late") or self.waiting
                self._answered = _NEVER if message["nobody"] is None else message["nobody"]
                self._arrived.notify_all()
        elif "table" in message:
            self.table = {int(rank): progress for rank, progress in message["table"].items()}
        elif "where" in message:
            frame = self._frame()
            self._lines.send({"at": _line(frame), "waits": _place(frame) is not None})
        elif "failed" in message:
            raise WorldError(
                f"the watcher of rank {self.rank} is not running: {message['failed']}. Open the network between the "
                f"hosts (`fleetx doctor` checks it), or set {SWITCH}=0 to train without it"
            )

    def _frame(self) -> FrameType | None:
        """The current frame of the main thread."""
        return sys._current_frames().get(self._main.ident or 0)

    def _warn(self, text: str) -> None:
        limit = self._world.timeout.total_seconds()
        print(f"fleetx: {text}. A collective gives up after {limit:.0f} s", file=sys.stderr, flush=True)

    def _judge(self, verdict: dict[str, Any]) -> None:
        if self.ended:
            return
        with self._arrived:
            self.verdict = verdict
            self._arrived.notify_all()
        _cut(set(verdict.get("ports", ())), self.store)
        grace = OWN_GRACE if verdict["rank"] == self.rank else GRACE
        threading.Thread(target=self._insist, args=(grace,), name="fleetx-insist", daemon=True).start()

    def _insist(self, grace: float) -> None:
        """End this process if the main thread waits for the lost rank where no error can reach it."""
        while not self.told.wait(grace):
            before = _place(self._frame())
            if before is None:  # it is not waiting, and will find out when it communicates
                continue
            if self.told.wait(min(grace, 1.0)) or self.ended:
                return
            if _place(self._frame()) == before:
                text = f"WorldError: {self.explained()}"
                print(f"fleetx: {text}", file=sys.stderr, flush=True)
                _write_down(text, follows=self.verdict is not None and self.verdict["how"] != "unwatched")
                os._exit(1)


def _write_down(text: str, *, follows: bool) -> None:
    """Write the error for the launcher, in torchelastic's format, because no exception leaves the script."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time()
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(now))}}
        ours = {"time": now, "exit_code": 1, "kind": "WorldError", "follows": follows}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "fleetx": ours}), encoding="utf-8")


def _place(frame: FrameType | None) -> tuple[int, int] | None:
    """The instruction that a frame is at, if it is in torch.distributed, backward or `fleetx.comm`; else None."""
    if frame is None:
        return None
    name = frame.f_code.co_filename
    waits = name.startswith((os.path.join(_TORCH, "distributed"), os.path.join(_FLEETX, "comm")))
    backward = name.startswith(os.path.join(_TORCH, "autograd"))
    return (id(frame), frame.f_lasti) if waits or backward else None


def _line(frame: FrameType | None) -> str | None:
    """The innermost line of the user's code."""
    found = user_frame(frame) if frame is not None else None
    if found is None:
        return None
    return f"{os.path.basename(found.f_code.co_filename)}:{found.f_lineno} in {found.f_code.co_name}"


def _cut(ports: set[int], store: Any) -> None:
    """Close the connections to the other ranks, so that a collective that waits on them raises an error.

    gloo cannot be interrupted: its `abort` does nothing. Its connections are those that arrived on a port on which this
    process listens, or that lead to one on which another rank listens. The store's are left alone.
    """
    for group in list(seams.c10d_world.pg_map) if torch.cuda.is_available() else ():
        with contextlib.suppress(Exception):
            group.abort()
    keep = {getattr(_innermost(store), "port", None)}
    for number, local, remote in kernel.connections():
        if (local in ports or remote in ports) and not {local, remote} & keep:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _innermost(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


_watch: Watch | None = None
_sessions = 0


def next_session() -> int:
    """The number of the next session of this process. It is the same on every rank."""
    global _sessions
    _sessions += 1
    return _sessions


def of(world: World) -> Watch | None:
    """The watch of this process group, started on the first call. None without other ranks, or if it is turned off."""
    global _watch
    if world.size == 1 or os.environ.get(SWITCH) == "0":
        return None
    if _watch is not None and _watch.store is not seams.default_store():
        _watch.close()  # of a process group that is gone
        _watch = None
    if _watch is None:
        _watch = Watch(world)
    return _watch


def _forget() -> None:
    global _watch
    _watch = None


os.register_at_fork(after_in_child=_forget)  # the watcher belongs to the parent

"""A rank that is lost, late or gone is named on every other rank, with what it was doing; and no other is."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fleetx import WorldError, fleet
from fleetx.comm import alarm, watcher
from fleetx.comm.lines import Lines
from forked_ranks import forked
from training import net, sgd

HERE = socket.gethostname()
STRATEGIES = {
    "plain": {},
    "merge": {"gradient_merge": {"k_steps": 2}},
    "localsgd": {"localsgd": {"k_steps": 1}},
    "sharding": {"sharding": True},
    "pipeline": {"pipeline": {"stages": ["2"], "micro_batch": 4}},
}


def train(fault, declared=None, timeout=60.0, steps=40):
    """Steps of a small network; rank 1 meets its fault in the eleventh."""
    fleet.init(timeout=timedelta(seconds=timeout))
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**(declared or {})))
    x, y = torch.ones(4, 6), torch.ones(4, 3)
    for step in range(steps):
        if step == 10:
            print("tenth", flush=True)
            if fleet.worker_index() == 1:
                fault()
        fleet.forward_backward(x, y, loss_fn=nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    print("finished", flush=True)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)  # another thread may take the signal, and this one run on for a moment


def pause():
    subprocess.Popen([sys.executable, "-S", "-c", f"import os, time; time.sleep(4); os.kill({os.getpid()}, 18)"])
    stop()


def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(7)  # PyDLL keeps the lock: no thread of this process runs


def fail():
    raise ValueError("bad sample 17")


def run_out_of_memory():
    torch.empty(1 << 60)


def crash():
    ctypes.string_at(0)


def leave():
    sys.exit(0)


def exit_at_once():
    os._exit(0)


def sleep():
    time.sleep(60)


NAMED = {
    kill: "was killed or crashed after step 10",
    crash: "was killed or crashed after step 10",
    exit_at_once: "was killed or crashed after step 10",
    stop: "was stopped by a signal (SIGSTOP, Ctrl-Z or a debugger) after step 10, and stood still for",
    fail: "raised ValueError: bad sample 17 (test_lost_ranks.py:",
    run_out_of_memory: "raised RuntimeError: ",
}


@pytest.mark.parametrize("fault", NAMED, ids=lambda fault: fault.__name__)
def test_every_other_rank_names_the_lost_one(tmp_path, fault):
    with forked(tmp_path, 3, train, fault) as ranks:
        ranks.wait(0, 2)
        for rank in (0, 2):
            assert ranks.codes[rank] == 1  # an error, and no SIGABRT
            said = ranks.log(rank)
            assert said.count("WorldError: ") == 1, said
            assert f"WorldError: rank {rank} cannot continue: rank 1 on {HERE} {NAMED[fault]}" in said


@pytest.mark.parametrize("name", [n for n in STRATEGIES if n != "plain"])
@pytest.mark.parametrize(
    "fault", [kill, pytest.param(stop, marks=pytest.mark.nightly)], ids=lambda fault: getattr(fault, "__name__", "stop")
)
def test_under_every_kind_of_strategy(tmp_path, fault, name):
    with forked(tmp_path, 2, train, fault, STRATEGIES[name]) as ranks:
        ranks.wait(0)
        assert ranks.codes[0] == 1
        assert f"WorldError: rank 0 cannot continue: rank 1 on {HERE} was " in ranks.log(0), ranks.log(0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_rank_0_is_named_too(tmp_path, how):
    with forked(tmp_path, 3, train, sleep) as ranks:
        ranks.wait_for("tenth", 0)
        os.kill(ranks.pids[0], how)
        ranks.wait(2)
        assert f"WorldError: rank 2 cannot continue: rank 0 on {HERE} was " in ranks.log(2)


def test_ranks_that_left_early_are_named(tmp_path):
    with forked(tmp_path, 3, train, leave) as ranks:
        ranks.wait(0, 1, 2)
        assert ranks.codes == {0: 1, 1: 0, 2: 1}
        for rank in (0, 2):
            told = f"the script had already ended on rank 1 after 10 updates, while rank {rank} continued after 10"
            assert f"WorldError: {told}" in ranks.log(rank)
            assert "fleet.join(loader)" in ranks.log(rank)


@pytest.mark.parametrize("fault", [pause, hold_the_interpreter], ids=lambda fault: fault.__name__)
def test_a_pause_of_four_seconds_or_a_held_interpreter_is_no_fault(tmp_path, fault):
    with forked(tmp_path, 2, train, fault) as ranks:
        ranks.wait(0, 1)
        assert ranks.codes == {0: 0, 1: 0}, ranks.log(0) + ranks.log(1)


def test_a_rank_that_others_wait_for_is_named_while_it_lives_and_when_the_time_is_up(tmp_path):
    with forked(tmp_path, 2, train, sleep, None, 13.0) as ranks:
        ranks.wait(0)
        late = f"rank 1 on {HERE}, which is alive, after step 10 (test_lost_ranks.py:"
        assert f"s in backward for {late}" in ranks.log(0)
        assert "WorldError: rank 0 has been waiting" in ranks.log(0)
        assert "the other ranks have been waiting" in ranks.log(1)


def without_leaving():
    """A script that makes its own group, and neither destroys it nor says goodbye."""
    dist.init_process_group("gloo")
    train(lambda: None, steps=12)


def test_scripts_end_cleanly_without_destroying_their_group_and_leave_no_watcher(tmp_path):
    for _ in range(3):
        with forked(tmp_path, 2, without_leaving) as ranks:
            ranks.wait(0, 1)
            assert ranks.codes == {0: 0, 1: 0}, ranks.log(0) + ranks.log(1)


def test_no_watcher_survives_its_rank(tmp_path):
    with forked(tmp_path, 2, train, sleep) as ranks:
        ranks.wait_for("tenth", 0)
        watchers = [pid for pid in _watchers() if _parent(pid) in ranks.pids]
        assert len(watchers) == 2
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)
        ranks.wait(0, 1)
        end = time.monotonic() + 30
        while any(pid in _watchers() for pid in watchers):
            assert time.monotonic() < end
            time.sleep(0.05)


def _watchers():
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                if watcher.__file__.encode() in file.read().split(b"\0"):
                    found.append(int(name))
        except OSError:
            continue
    return found


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


# --- the watcher alone ----------------------------------------------------------------------------
class Heard:
    """Takes what a watcher sends."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def hub(size=3):
    start = {"rank": 0, "size": size, "pid": os.getpid(), "host": "a", "token": "secret"}
    made = watcher.Watcher(Heard(), start, bytearray(watcher.PLACE.size))
    for rank in range(size):
        made.ranks[rank] = watcher.Rank("ab"[rank % 2])
        made.at_hub(rank, {"beat": rank, "stopped": 0.0, "progress": 7, "steps": 3, "for": 0.1, "doing": "backward"})
    return made


def test_a_rank_that_is_silent_for_longer_than_the_patience_is_cut_off():
    made = hub()
    made.ranks[1].silent = watcher.PATIENCE
    made.look_around()
    assert made.verdict is None
    made.ranks[1].silent += 0.1
    made.look_around()
    told = alarm.lost(made.verdict, 2)
    assert told.startswith(
        "rank 2 cannot continue: rank 1 on b has not answered for 4.5 s; it was in backward of step 4"
    )
    assert "the network is cut" in told


def test_the_first_verdict_stands():
    made = hub()
    made.at_hub(1, {"raised": "ValueError: bad", "progress": 7, "steps": 3, "for": 0.1, "doing": "backward"})
    made.at_hub(2, {"killed": 2, "memory": False, "progress": 7, "steps": 3, "for": 0.1, "doing": "backward"})
    assert (made.verdict["rank"], made.verdict["how"]) == (1, "raised")
    assert sum("verdict" in message for message in made.parent.sent) == 1


def test_a_kill_for_lack_of_memory_is_called_that():
    made = hub()
    made.at_hub(1, {"killed": 1, "memory": True, "progress": 7, "steps": 3, "for": 0.1, "doing": "backward"})
    assert "killed a process for lack of memory" in alarm.lost(made.verdict, 0)


def test_strangers_are_not_let_in():
    made = hub(2)
    made.ranks = {0: made.ranks[0]}
    for line in (b'{"token": "wrong", "rank": 1, "host": "x"}\n', b"GET / HTTP/1.0\r\n\n", b"[1]\n", b'{"rank": 1}\n'):
        ours, theirs = socket.socketpair()
        client = Lines(ours)
        made.clients[client] = None
        theirs.sendall(line)
        made.from_client(client)
        assert client not in made.clients
        assert 1 not in made.ranks
        theirs.close()


def test_only_errors_of_the_network_are_explained():
    assert not alarm.is_network(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not alarm.is_network(ValueError("gloo"))
    text = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7299. This is typically caused by"
    assert alarm.is_network(RuntimeError(text))
    assert alarm.saw(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:7299"
    assert issubclass(WorldError, RuntimeError)

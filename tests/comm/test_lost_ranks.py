"""A rank that is lost, late or gone is named on every other rank, with what it was doing; and no other is."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fleetx import WorldError, fleet
from fleetx.comm import alarm, watcher
from fleetx.comm.hub import CONNECT, SILENT, Hub
from fleetx.comm.json_socket import JsonSocket
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
    """Stop for four seconds. A helper wakes this rank, and writes down how long it really stood still."""
    helper = (
        f"import os, time\nwhile open('/proc/{os.getpid()}/stat').read().rpartition(')')[2].split()[0] != 'T':\n"
        "    time.sleep(0.001)\n"
        f"start = time.monotonic(); time.sleep(4); os.kill({os.getpid()}, 18)\n"
        "print('paused', time.monotonic() - start, flush=True)"
    )
    subprocess.Popen([sys.executable, "-S", "-c", helper])
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


def oversleep():
    time.sleep(8)


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
        if how == signal.SIGSTOP:  # it runs again, but the others are gone, and gloo may not notice
            os.kill(ranks.pids[0], signal.SIGCONT)
            ranks.wait(0)
            assert f"WorldError: rank 0 cannot continue: rank 0 on {HERE} was stopped by a signal" in ranks.log(0)


def test_ranks_that_left_early_are_named(tmp_path):
    with forked(tmp_path, 3, train, leave) as ranks:
        ranks.wait(0, 1, 2)
        assert ranks.codes == {0: 1, 1: 0, 2: 1}
        for rank in (0, 2):
            told = f"the script had already ended on rank 1 after 10 updates, while rank {rank} continued after 10"
            assert f"WorldError: {told}" in ranks.log(rank)
            assert "fleet.join(loader)" in ranks.log(rank)


def test_a_held_interpreter_is_no_fault(tmp_path):
    with forked(tmp_path, 2, train, hold_the_interpreter) as ranks:
        ranks.wait(0, 1)
        assert ranks.codes == {0: 0, 1: 0}, ranks.log(0) + ranks.log(1)


@pytest.mark.parametrize("fault", [pause])
def test_a_pause_of_four_seconds_is_no_fault(tmp_path, fault):
    for attempt in range(5):
        (tmp_path / str(attempt)).mkdir()
        with forked(tmp_path / str(attempt), 2, train, fault) as ranks:
            ranks.wait(0)
            ranks.wait_for("paused", 1)
            if float(ranks.log(1).partition("paused ")[2].split()[0]) > watcher.STOPPED - 0.05:
                continue  # the machine was too busy to end it in time: that says nothing
            ranks.wait(1)
            assert ranks.codes == {0: 0, 1: 0}, ranks.log(0) + ranks.log(1)
            return
    pytest.skip("the machine is too busy for pauses of exactly four seconds")


def test_a_rank_that_others_wait_for_is_named_while_it_lives(tmp_path):
    with forked(tmp_path, 2, train, sleep) as ranks:
        ranks.wait_for("the other ranks have been waiting", 1)
        ranks.wait_for("has been waiting", 0)
        late = f"rank 1 on {HERE}, which is alive, after step 10 (test_lost_ranks.py:"
        assert f"s in backward for {late}" in ranks.log(0)


def test_a_rank_that_others_wait_for_is_named_when_the_time_is_up(tmp_path):
    """Also if the time is up before anybody was named, and on the rank that came too late."""
    with forked(tmp_path, 3, train, oversleep, None, 3.0) as ranks:
        ranks.wait(0, 1, 2)
        for rank in (0, 2):
            said = ranks.log(rank).partition("WorldError: ")[2]
            assert f"for rank 1 on {HERE}, which is alive, after step 10" in said, ranks.log(rank)
        assert re.search(r"WorldError: rank 1 cannot continue: rank [02] on .* gave up in backward", ranks.log(1))


def wait_for_each_other():
    """Each rank waits in a group of its own for the other one."""
    fleet.init()
    model = net()
    model, optimizer = fleet.distribute(model, sgd(model))
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    x, y = torch.ones(4, 6), torch.ones(4, 3)
    for step in range(20):
        if step == 10:
            dist.barrier(groups[fleet.worker_index()])
        fleet.forward_backward(x, y, loss_fn=nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()


def test_ranks_that_wait_for_each_other_are_named(tmp_path):
    with forked(tmp_path, 2, wait_for_each_other) as ranks:
        for rank in (0, 1):
            ranks.wait_for("so they are waiting for each other", rank)
            for other in (0, 1):
                where = rf"rank {other} on {HERE} is after step 10 \(test_lost_ranks.py:\d+ in wait_for_each_other\)"
                assert re.search(where, ranks.log(rank)), ranks.log(rank)


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


START = {
    "rank": 0, "size": 2, "pid": os.getpid(), "host": "a", "token": "secret", "hub": ["127.0.0.1", 1], "hub_host": "a",
}  # fmt: skip

BEAT = {"progress": 7, "steps": 3, "for": 0.1, "doing": "backward"}


def hub(size=3):
    made = Hub(size, lambda rank, message: sent.append((rank, message)))
    made.sent = sent = []
    for rank in range(size):
        made.join(rank, "ab"[rank % 2])
        made.hear(rank, {"beat": rank} | BEAT)
    sent.clear()
    return made


def told(made, rank, what):
    return [message[what] for to, message in made.sent if to == rank and what in message]


def test_a_rank_that_is_silent_for_too_long_is_cut_off():
    made = hub()
    made.ranks[1].silent = SILENT - 0.1
    made.look(0.05)
    assert made.verdict is None
    made.look(0.1)
    text = alarm.lost(made.verdict, 2)
    assert text.startswith(
        "rank 2 cannot continue: rank 1 on b has not answered for 4.6 s; it was in backward of step 4"
    )
    assert "the network is cut" in text


def stands(made, *, idle=2.0, seconds=6.0):
    for rank in made.ranks:
        made.hear(rank, {"beat": rank} | BEAT | {"for": seconds, "idle": idle if rank else 2.0, "at": "train.py:3"})
    made.look(0.05)
    return told(made, 0, "standstill")


def test_a_standstill_is_told_once():
    made = hub()
    (places,) = stands(made)
    text = alarm.standstill(places, 6.0)
    assert "no rank has moved for 6 s: rank 0 on a is in backward of step 4 (train.py:3); rank 1 on b is" in text
    assert len(stands(made, seconds=7.0)) == 1
    assert len(stands(made, seconds=25.0)) == 2


@pytest.mark.parametrize("why", ["a rank computes", "not long enough", "longer than ever", "a rank has ended"])
def test_what_is_no_standstill(why):
    made = hub()
    if why == "longer than ever":
        made.ranks[2].longest = 3.0
    if why == "a rank has ended":
        made.hear(1, {"left": 3} | BEAT)
    assert not stands(made, idle=0.3 if why == "a rank computes" else 2.0, seconds=3.0 if "enough" in why else 6.0)


def test_a_rank_that_computes_or_sends_is_not_idle():
    one = watcher.Watcher(Heard(), START, bytearray(watcher.PLACE.size))
    assert one.idle_for() == 0.0
    one.waits = True
    assert one.idle_for() == 0.0
    for _ in range(50):  # a thread that another test left may compute now and then
        time.sleep(0.2)
        if one.idle_for() > 0.1:
            break
    else:
        pytest.fail("it is never idle")

    def idle_after_computing():
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return one.idle_for()

    # Other processes may have taken the processor at the last moment, but not every time.
    assert any(idle_after_computing() < 0.1 for _ in range(20))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as slow:
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(bytes(1 << 16))  # nobody reads it

        def idle_while_sending():
            time.sleep(0.2)
            return one.idle_for()

        assert any(idle_while_sending() < 0.1 for _ in range(20))


def test_the_first_verdict_stands():
    made = hub()
    made.hear(1, {"raised": "ValueError: bad"} | BEAT)
    made.hear(2, {"killed": "", "memory": False} | BEAT)
    assert (made.verdict["rank"], made.verdict["how"]) == (1, "raised")
    assert [len(told(made, rank, "verdict")) for rank in range(3)] == [1, 1, 1]


def test_a_rank_in_doubt_hears_that_all_is_well_only_when_all_others_have_answered():
    made = hub()
    made.hear(0, {"doubt": 5})
    assert [told(made, rank, "answer") for rank in range(3)] == [[[0, 5]]] * 3
    for rank in (0, 2):
        made.hear(rank, {"here": [0, 5]})
    made.hear(1, {"here": [0, 4]})  # the answer to an older question
    made.hear(1, {"beat": 1} | BEAT)  # of the watcher: the rank itself may be dying
    assert not told(made, 0, "nobody")
    made.hear(1, {"here": [0, 5]})
    assert told(made, 0, "nobody") == [5]


@pytest.mark.parametrize("last", [{"killed": "", "memory": False}, {"left": 3}, {"follows": "..."}])
def test_a_rank_in_doubt_hears_what_became_of_the_others_first(last):
    made = hub(2)
    made.hear(0, {"doubt": 1})
    made.hear(0, {"here": [0, 1]})
    made.hear(1, last | BEAT)
    heard = [key for to, message in made.sent if to == 0 for key in message]
    assert heard[-2:] == ["nobody", "late"]
    assert "follows" in last or heard.index("verdict" if "killed" in last else "left") < heard.index("nobody")


def test_a_rank_that_was_never_heard_of_is_lost_when_somebody_asks():
    made = Hub(2, lambda rank, message: None)
    made.join(0, "a")
    made.hear(0, {"beat": 0} | BEAT)
    made.look(CONNECT + 1)
    assert made.verdict is None  # it may still be starting
    made.hear(0, {"doubt": 1})
    made.look(0.1)
    assert made.verdict["rank"] == 1


def test_who_comes_late_hears_the_verdict_and_the_question():
    made = hub()
    del made.ranks[2]
    made.hear(0, {"doubt": 3})
    made.lose(1, "killed")
    made.join(2, "c")
    assert told(made, 2, "verdict")[0]["rank"] == 1
    assert told(made, 2, "answer") == [[0, 3]]


def test_seconds_of_a_stop_are_never_counted_before_it_was_seen(monkeypatch):
    seen = watcher.Watcher(Heard(), START, bytearray(watcher.PLACE.size))
    seen.hub.join(0, "a")
    monkeypatch.setattr(watcher.kernel, "stopped", lambda pid: True)
    seen.look_at_rank(watcher.BEAT)
    assert seen.stopped == 0.0
    while seen.stopped <= watcher.STOPPED:
        assert seen.hub.verdict is None
        seen.look_at_rank(watcher.TICK)
    assert seen.hub.verdict["how"] == "stopped"
    monkeypatch.setattr(watcher.kernel, "stopped", lambda pid: False)
    seen.look_at_rank(watcher.TICK)
    assert seen.stopped is None


def test_a_hub_that_is_still_starting_is_not_silent():
    """Its port is open before its process runs, which takes long on a busy machine."""
    seen = watcher.Watcher(Heard(), START | {"rank": 1}, bytearray(watcher.PLACE.size))
    ours, theirs = socket.socketpair()
    seen.up = JsonSocket(ours)
    seen.look_around(CONNECT - 1)
    assert seen.verdict is None
    theirs.sendall(b"{}\n")
    seen.from_hub()
    seen.look_around(SILENT - 0.1)
    assert seen.verdict is None
    seen.look_around(0.2)
    assert "has not answered for 4.6 s; it was not heard of before" in alarm.lost(seen.verdict, 1)
    ours.close(), theirs.close()


def test_a_watcher_that_connects_late_hears_which_ranks_have_left():
    """On a busy machine a watcher may start after the first steps."""
    sent = []
    made = Hub(3, lambda rank, message: sent.append((rank, message)))
    made.join(0, "a")
    made.join(1, "b")
    made.hear(1, {"left": 10} | BEAT)
    made.hear(0, {"doubt": 1})
    sent.clear()
    made.join(2, "c")
    made.hear(2, {"doubt": 1})
    assert sent[:2] == [(2, {"left": 1, "updates": 10}), (2, {"answer": [0, 1]})]


def test_a_kill_for_lack_of_memory_is_called_that():
    made = hub()
    made.hear(1, {"killed": "", "memory": True} | BEAT)
    assert "killed a process for lack of memory" in alarm.lost(made.verdict, 0)


def test_a_line_that_is_nested_too_deeply_closes_its_connection():
    ours, theirs = socket.socketpair()
    theirs.sendall(b"[" * 60_000 + b"\n")
    lines, found = JsonSocket(ours), []
    while found == []:
        found = lines.read()
    assert found is None
    ours.close()
    theirs.close()


@pytest.fixture
def doorway():
    """The watcher of rank 0 of two, with a real listener; `knock` connects and sends, and returns the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = watcher.Watcher(Heard(), START, bytearray(watcher.PLACE.size), listener)
        made.hub.join(0, "a")
        knocked = []

        def knock(line=b""):
            knocked.append(socket.create_connection(listener.getsockname(), timeout=10))
            knocked[-1].sendall(line)
            made.from_door(listener)
            return knocked[-1]

        def read():
            """Whatever has arrived."""
            for one in watcher.kernel.readable([*made.clients, *made.strangers], 1.0):
                made.from_door(one)

        made.knock, made.read_all = knock, read
        yield made
        for one in knocked:
            one.close()
        for one in (*made.clients, *made.strangers):
            one.socket.close()


def test_the_table_of_connections_is_read_only_after_a_change_of_the_rank_s_sockets(doorway, monkeypatch):
    read, real = [], watcher.kernel.listening
    monkeypatch.setattr(watcher.kernel, "listening", lambda pid: read.append(pid) or real(pid))
    doorway.pid = os.getpid()
    for _ in range(4):
        doorway.ports = doorway.scan()
    assert len(read) == 2
    with socket.socket() as late:
        late.bind(("127.0.0.1", 0))
        port = late.getsockname()[1]
        assert port not in doorway.scan()
        late.listen()
        for _ in range(3):
            doorway.ports = doorway.scan()
            assert port in doorway.ports
    assert len(read) == 4
    for _ in range(3):
        doorway.ports = doorway.scan()
    assert port not in doorway.ports
    assert len(read) == 6


def closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # not all that it sent was read
        return True


PROOF = b'{"token": "secret", "rank": 1, "host": "b"}\n'


@pytest.mark.parametrize(
    "line",
    [
        b'{"token": "wrong", "rank": 1, "host": "x"}\n', b"GET / HTTP/1.0\r\n\n", b"[1]\n", b'{"rank": 1}\n',
        b'{"token": ["secret"], "rank": 1}\n', b'{"token": "\\ud800", "rank": 1}\n',
        b'{"token": "secret", "rank": true}\n',
        b'{"token": "secret", "rank": 2}\n', b'{"token": "secret", "rank": "1"}\n', b"\xff\xfe\n", b"[" * 1000 + b"\n",
        b'{"beat": 1}\n' + PROOF,
    ],
)  # fmt: skip
def test_strangers_are_not_let_in(doorway, line):
    other = doorway.knock(line)
    doorway.read_all()
    assert not doorway.clients
    assert not doorway.strangers
    assert 1 not in doorway.hub.ranks
    assert closed(other)


@given(st.binary(max_size=1500) | st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_whatever_a_stranger_sends_it_is_turned_away(data):
    made = watcher.Watcher(Heard(), START, bytearray(watcher.PLACE.size))
    ours, theirs = socket.socketpair()
    client = JsonSocket(ours, watcher.STRANGER)
    made.strangers[client] = 0.0
    with theirs:
        theirs.sendall(data + b"\n")
        theirs.shutdown(socket.SHUT_WR)
        while made.strangers:
            made.from_door(client)
    assert not made.clients
    assert not made.hub.ranks


def test_a_stranger_may_send_a_kilobyte_at_most(doorway):
    doorway.knock(b'{"token": "' + b"x" * watcher.STRANGER)
    doorway.read_all()
    assert not doorway.strangers
    doorway.knock(PROOF + b'{"beat": 1, "progress": 1, "for": 0, "more": "' + b"x" * 5000 + b'"}\n')
    while "more" not in (doorway.hub.ranks[1].beat if 1 in doorway.hub.ranks else {}):
        doorway.read_all()  # who has shown the token may send more, also if it arrives together


def test_a_stranger_that_says_nothing_is_closed_after_some_seconds(doorway):
    silent = doorway.knock(b'{"token": ')
    doorway.look_around(0.0)
    assert len(doorway.strangers) == 1
    doorway.strangers = {one: since - watcher.PROOF - 1 for one, since in doorway.strangers.items()}
    doorway.look_around(0.0)
    assert not doorway.strangers
    assert closed(silent)


def test_however_many_strangers_there_are_a_rank_gets_in(doorway):
    idle = [doorway.knock() for _ in range(3 * watcher.SPARE)]
    assert len(doorway.strangers) == watcher.SPARE + 2
    assert closed(idle[0])  # the oldest gave way
    doorway.knock(PROOF)
    doorway.read_all()
    assert list(doorway.clients.values()) == [1]


def test_only_errors_of_the_network_are_explained():
    assert not alarm.is_network(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not alarm.is_network(ValueError("gloo"))
    text = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:7299. This is typically caused by"
    assert alarm.is_network(RuntimeError(text))
    assert alarm.saw(RuntimeError(text)) == "Connection closed by peer [127.0.0.1]:7299"
    assert issubclass(WorldError, RuntimeError)

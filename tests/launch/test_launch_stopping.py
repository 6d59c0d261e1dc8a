"""fleetrun itself is stopped: so is everything it started."""

from __future__ import annotations

import contextlib
import signal
import socket
from functools import partial

import psutil
import pytest
from launching import PACKAGES, until

# A worker with children: one in its group, one in its own session, one orphaned.
FAMILY = """
import os, subprocess, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 1000 &"], check=True)
with open(f"up.{os.environ['RANK']}", "w") as file:
    print("up", file=file)
time.sleep(1000)
"""
EARLY, LATE = "while fleetrun imports torch", "when torchelastic has taken over"


@pytest.fixture
def fleetrun(fleetrun):
    """As a user starts it: these tests are about what a process inherits, and about signals while it starts."""
    return partial(fleetrun, cold=True)


@pytest.fixture
def family(fleetrun):
    def begin(moment):
        run = fleetrun(FAMILY, options="--nproc_per_node 2 --stop_timeout 600")
        for rank in (0, 1):
            run.wait_for(f"up.{rank}")
        if moment == LATE:
            run.wait_for_the_agent()
        return run

    return begin


@pytest.mark.parametrize(("number", "moment", "code"), [(signal.SIGINT, EARLY, 130), (signal.SIGTERM, LATE, 143)])
def test_a_signal_ends_everything_with_one_line(family, number, moment, code):
    run = family(moment)
    run.signal(number)
    run.finish()  # well before --stop_timeout
    assert run.code == code
    assert run.err.splitlines()[1:] == [f"fleetrun: stopped by {number.name}"]
    assert "Traceback" not in run.out
    assert run.survivors() == []


def test_a_signal_that_an_import_turns_into_another_error_is_still_a_signal(fleetrun, tmp_path):
    """As numpy does while fleetrun imports torch."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except BaseException:\n    raise ImportError('cannot import a C extension') from None\n"
    )
    run = fleetrun("import time\ntime.sleep(1000)", PYTHONPATH=f"{tmp_path}:{PACKAGES}").finish()
    assert run.code == 143, run.err
    assert run.err.splitlines()[1:] == ["fleetrun: stopped by SIGTERM"]
    assert run.survivors() == []


def test_under_nohup_sighup_is_ignored_and_a_worker_can_save_its_work_on_ctrl_c(fleetrun):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # children inherit this
    try:
        run = fleetrun(
            """
            import time
            try:
                print("up", file=open("up", "w")); time.sleep(1000)
            except KeyboardInterrupt:
                time.sleep(0.3); print("saved")
            """,
            options="--stop_timeout 600",
        )
    finally:
        signal.signal(signal.SIGHUP, previous)
    run.wait_for("up")
    run.wait_for_the_agent()
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGINT)
    assert run.finish().code == 130, run.err
    assert run.out == "saved\n"


def test_a_second_ctrl_c_does_not_wait(fleetrun):
    run = fleetrun(
        """
        import signal, time
        signal.signal(signal.SIGINT, lambda *_: print("ignored", flush=True))
        print("up", file=open("up", "w"))
        while True: time.sleep(1000)
        """,
        options="--stop_timeout 600",
    )
    run.wait_for("up")
    run.signal(signal.SIGINT)
    until(lambda: "ignored" in run.log(0), what="the first Ctrl-C to reach the worker")
    run.signal(signal.SIGINT)
    assert run.finish().code == 130
    assert run.survivors() == []


def test_kill_9_of_fleetrun_leaves_nothing_running(family):
    run = family(LATE)
    run.signal(signal.SIGKILL)
    run.finish()
    assert run.code == -signal.SIGKILL
    until(lambda: run.survivors() == [], what="everything to be gone")


def test_after_sigterm_a_worker_saves_its_state_with_the_help_of_its_children(fleetrun):
    """The signal goes to the workers once, and not to their data loaders; the exit code is for a scheduler."""
    run = fleetrun(
        """
        import os, signal, subprocess, sys, time
        loader = subprocess.Popen(["sleep", "1000"])
        got = []
        signal.signal(signal.SIGTERM, lambda *_: got.append(1))
        with open(f"up.{os.environ['RANK']}", "w") as file:
            print("up", file=file)
        while not got: time.sleep(0.01)
        time.sleep(0.5)
        print("signals", len(got), "loader", loader.poll(), flush=True)
        sys.exit(143)
        """,
        options="--nproc_per_node 2 --grace_period 600 --stop_timeout 0 --max_restarts 5 --cold",
    )
    run.wait_for("up.0"), run.wait_for("up.1")
    run.signal(signal.SIGTERM)
    run.finish()
    assert run.code == 143
    assert run.log(0) == run.log(1) == "signals 1 loader None\n"
    assert run.err.splitlines()[1:] == ["fleetrun: stopped by SIGTERM"]
    assert run.survivors() == []


def test_a_worker_that_does_not_stop_within_the_grace_period_is_killed(fleetrun):
    run = fleetrun(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", file=open("up", "w"))
        while True: time.sleep(1000)
        """,
        options="--grace_period 1 --stop_timeout 600",
    )
    run.wait_for("up")
    run.signal(signal.SIGTERM)
    assert run.finish().code == 143
    assert run.err.splitlines()[1:] == [
        "fleetrun: stopped by SIGTERM; 1 worker did not exit in time and had to be killed"
    ]
    assert run.survivors() == []


def test_everything_listens_on_loopback_and_junk_on_its_ports_does_not_matter(fleetrun, tmp_path):
    run = fleetrun(
        """
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        with open(f"up.{os.environ['RANK']}", "w") as file:
            print("up", file=file)
        while not os.path.exists("go"): time.sleep(0.01)
        total = torch.ones(1)
        dist.all_reduce(total)
        print("sum", int(total))
        dist.destroy_process_group()
        """,
        options="--nproc_per_node 2 --max_restarts 1",
        cold=False,
    )
    run.wait_for("up.0"), run.wait_for("up.1")
    processes = (psutil.Process(pid) for pid in run.survivors())
    listening = [c for p in processes for c in p.net_connections() if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # the store, and gloo in both workers
    assert {connection.laddr.ip for connection in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    for connection in listening:
        for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096):
            with contextlib.suppress(OSError), socket.create_connection(connection.laddr[:2], timeout=5) as peer:
                peer.sendall(junk)
    (tmp_path / "go").touch()
    run.finish()
    assert run.code == 0, run.err
    assert run.out == "sum 2\n"
    assert len(run.err.splitlines()) == 1

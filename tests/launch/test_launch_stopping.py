"""fleetrun itself is stopped: so is everything it started."""

from __future__ import annotations

import signal

import pytest
from launching import until

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

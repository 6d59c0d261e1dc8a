"""fleetrun itself is stopped: so is everything it started."""

from __future__ import annotations

import signal
import time

import pytest
from launching import start, until

# A worker with children: in its group, in a session of its own, and orphaned.
FAMILY = """
import os, subprocess, time
subprocess.Popen(["sleep", "60"])
subprocess.Popen(["sleep", "60"], start_new_session=True)
subprocess.run(["sh", "-c", "setsid sleep 60 &"], check=True)
with open(f"up.{os.environ['RANK']}", "w") as file:
    print("up", file=file)
time.sleep(60)
"""
EARLY, LATE = "while fleetrun imports torch", "when torchelastic has taken over"


@pytest.fixture
def family(fleetrun):
    def begin(moment):
        run = fleetrun(FAMILY, options="--nproc_per_node 2")
        for rank in (0, 1):
            run.wait_for(f"up.{rank}")
        if moment == LATE:
            run.wait_for_the_agent()
        return run

    return begin


@pytest.mark.parametrize(
    ("number", "moment", "code"), [(signal.SIGINT, EARLY, 130), (signal.SIGINT, LATE, 130), (signal.SIGTERM, LATE, 143)]
)
def test_a_signal_ends_everything_tersely(family, number, moment, code):
    run = family(moment)
    asked = time.monotonic()
    run.signal(number)
    run.finish()
    assert time.monotonic() - asked < 5
    assert run.code == code
    assert run.err.splitlines()[1:] == [f"fleetrun: stopped by {number.name}"]
    assert "Traceback" not in run.out
    assert run.survivors() == []


def test_a_worker_may_save_its_work_on_ctrl_c(fleetrun):
    run = fleetrun(
        """
        import time
        try:
            print("up", file=open("up", "w")); time.sleep(60)
        except KeyboardInterrupt:
            time.sleep(0.3); print("saved")
        """
    )
    run.wait_for("up")
    run.signal(signal.SIGINT)
    assert run.finish().code == 130
    assert run.out == "saved\n"


def test_a_second_ctrl_c_does_not_wait(fleetrun):
    run = fleetrun(
        """
        import signal, time
        signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
        print("up", file=open("up", "w")); time.sleep(60)
        time.sleep(60)
        """,
        options="--stop_timeout 60",
    )
    run.wait_for("up")
    run.signal(signal.SIGINT)
    until(lambda: "no" in run.log(0), what="the first to be heard")
    run.signal(signal.SIGINT)
    assert run.finish().code == 130
    assert run.survivors() == []


@pytest.mark.parametrize("moment", [EARLY, LATE])
def test_kill_9_of_fleetrun_leaves_nothing_behind(family, moment):
    run = family(moment)
    run.signal(signal.SIGKILL)
    run.finish()
    assert run.code == -signal.SIGKILL
    until(lambda: run.survivors() == [], what="all to be gone", seconds=5)


def test_under_nohup_the_end_of_the_terminal_is_not_the_end_of_the_training(tmp_path):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is ignored stays so in children
    try:
        run = start(
            tmp_path,
            "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('still here')",
        )
    finally:
        signal.signal(signal.SIGHUP, previous)
    run.wait_for_the_agent()
    run.signal(signal.SIGHUP)
    time.sleep(0.3)
    (tmp_path / "go").touch()
    run.finish()
    assert run.code == 0, run.err
    assert run.out == "still here\n"

"""One worker fails: all are stopped, and the report says which failed first."""

from __future__ import annotations

import pytest

# Rank 1 fails in each of them; rank 0 would run for a long time.
RUNS = {
    "raises": (
        """
        import os, time
        def main():
            if os.environ["RANK"] == "1":
                raise ValueError("bad sample")
            time.sleep(1000)
        main()
        """,
        "--nproc_per_node 2",
    ),
    "killed": (
        """
        import os, signal, subprocess, time
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            print("last output", flush=True)
            while not os.path.exists("ready"): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        open("ready", "w").close()
        time.sleep(1000)
        """,
        "--nproc_per_node 2 --stop_timeout 1",
    ),
    "hangs": (
        """
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(1000,)).start()
            raise ValueError("while a thread runs")
        time.sleep(1000)
        """,
        "--nproc_per_node 2 --stop_timeout 1",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_after_any_failure_the_exit_code_is_1_and_nothing_keeps_running(finished, name):
    run = finished(name)
    assert run.code == 1
    assert run.survivors() == []
    assert len(run.err.splitlines()) < 20
    assert "  log: log/workerlog.1\n" in run.err


def test_the_report_of_an_exception(finished):
    run = finished("raises")
    file = run.where / "train.py"
    assert run.err.splitlines()[1:] == [
        "fleetrun: rank 1 failed first: ValueError: bad sample (exit code 1)",
        "    Traceback (most recent call last):",
        f'      File "{file}", line 7, in <module>',
        "        main()",
        f'      File "{file}", line 5, in main',
        '        raise ValueError("bad sample")',
        "    ValueError: bad sample",
        "  log: log/workerlog.1",
    ]
    assert "runner.py" not in run.err + run.log(1)
    assert run.log(1).startswith("Traceback")


def test_the_report_of_a_kill_names_the_signal(finished):
    run = finished("killed")
    assert "rank 1 failed first: killed by SIGKILL\n" in run.err
    assert "last output" in run.err
    assert "rank 0" not in run.err  # it ignored SIGTERM and was killed by us, which is not a failure


def test_a_worker_whose_threads_keep_running_after_its_exception_is_killed(finished):
    run = finished("hangs")
    assert "rank 1 failed first: ValueError: while a thread runs (exit code 1)" in run.err

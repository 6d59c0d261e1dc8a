"""One worker fails: everything stops, and the first cause is named."""

from __future__ import annotations

import re

import pytest

# Rank 1 fails in each of them; rank 0 would stay for a minute.
RUNS = {
    "raises": (
        """
        import os, time
        def main():
            if os.environ["RANK"] == "1":
                raise ValueError("bad sample")
            time.sleep(60)
        main()
        """,
        "--nproc_per_node 2",
    ),
    "exits": (
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(3)
        time.sleep(60)
        """,
        "--nproc_per_node 2",
    ),
    "killed": (
        """
        import os, signal, subprocess, time
        subprocess.Popen(["sleep", "60"])
        subprocess.Popen(["sleep", "60"], start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            print("last words", flush=True)
            while not os.path.exists("ready"): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        open("ready", "w").close()
        time.sleep(60)
        """,
        "--nproc_per_node 2 --stop_timeout 1",
    ),
    "stuck": (
        """
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise ValueError("while a thread goes on")
        time.sleep(60)
        """,
        "--nproc_per_node 2 --stop_timeout 1",
    ),
    "stopped": (
        """
        import os, signal, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("ready"): time.sleep(0.01)
            time.sleep(0.2)
            os._exit(7)
        open("ready", "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
        """,
        "--nproc_per_node 2 --stop_timeout 30",
    ),
    "syntax": ("x = (\n", "--nproc_per_node 2"),
    "collective": (
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if dist.get_rank() == 1:
            raise ValueError("the cause, not the consequence")
        dist.all_reduce(torch.ones(1))
        """,
        "--nproc_per_node 2",
    ),
    "forks": (
        """
        import os, time
        if os.fork() == 0:
            raise ValueError("of a child, which is no worker")
        os.wait()
        time.sleep(1.5)
        if os.environ["RANK"] == "1":
            raise ValueError("of the worker")
        time.sleep(60)
        """,
        "--nproc_per_node 2 --stop_timeout 1",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_whatever_the_failure_the_exit_code_is_1_and_nothing_is_left(finished, name):
    run = finished(name)
    assert run.code == 1
    assert run.survivors() == []
    assert len(run.err.splitlines()) < 20
    assert "its log: log/workerlog." in run.err


def test_the_first_cause_is_printed_when_one_worker_raises(finished):
    run = finished("raises")
    file = run.where / "train.py"
    assert run.err.splitlines()[1:] == [
        "fleetrun: the first cause is rank 1: ValueError: bad sample (exit code 1)",
        "    Traceback (most recent call last):",
        f'      File "{file}", line 7, in <module>',
        "        main()",
        f'      File "{file}", line 5, in main',
        '        raise ValueError("bad sample")',
        "    ValueError: bad sample",
        "  its log: log/workerlog.1",
    ]
    assert "runner.py" not in run.err + run.log(1)
    assert run.log(1).startswith("Traceback")


def test_an_exit_code_is_printed_with_its_place(finished):
    run = finished("exits")
    assert f"rank 1: sys.exit(3) at {run.where / 'train.py'}:4 (exit code 3)" in run.err


def test_a_kill_is_printed_by_the_name_of_its_signal(finished):
    run = finished("killed")
    assert "the first cause is rank 1: killed by SIGKILL\n" in run.err
    assert "last words" in run.err
    assert "rank 0" not in run.err  # it ignored SIGTERM and was killed by us, which is no failure of its own


def test_a_worker_whose_threads_go_on_after_its_exception_is_ended(finished):
    run = finished("stuck")
    assert "the first cause is rank 1: ValueError: while a thread goes on (exit code 1)" in run.err


def test_a_stopped_worker_costs_no_grace(finished):
    run = finished("stopped")
    assert "the first cause is rank 1: exit code 7" in run.err
    assert run.seconds < 30


def test_a_syntax_error_is_shown_as_python_shows_it(finished):
    run = finished("syntax")
    assert re.search(r"first cause is rank [01]: SyntaxError: '\(' was never closed", run.err)
    assert "runner.py" not in run.err


def test_the_cause_is_not_the_one_that_lost_its_peer(finished):
    assert "the first cause is rank 1: ValueError: the cause, not the consequence" in finished("collective").err


def test_what_a_forked_child_raises_is_no_failure_of_its_worker(finished):
    assert "the first cause is rank 1: ValueError: of the worker (exit code 1)" in finished("forks").err

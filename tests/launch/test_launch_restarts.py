"""--max_restarts."""

from __future__ import annotations

from fleetx.launch.agent import LONGEST, QUICK, Pace

RUNS = {
    # With torchrun 2.13 three of four such restarts fail: the new ranks read the old ranks' addresses from the store.
    "gloo": (
        """
        import os, torch, torch.distributed as dist
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("attempt", attempt, "sum", int(total), flush=True)
        if dist.get_rank() == 1:
            if attempt == 0:
                os.kill(os.getpid(), 9)
            if attempt == 1:
                raise ValueError("the cause, not the consequence")
        dist.all_reduce(total)
        dist.destroy_process_group()
        """,
        "--nproc_per_node 2 --max_restarts 2",
    ),
    # Rank 0 is stopped in the last attempt. Fleetrun must wake it up, or it would wait for the whole --stop_timeout.
    "fails three times": (
        """
        import os, signal, sys, time
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if os.environ["RANK"] == "1":
            print("attempt", attempt, flush=True)
            if attempt == 0:
                raise ValueError("first")
            if attempt == 1:
                sys.exit(3)
            while not os.path.exists("pid") or open(f"/proc/{open('pid').read()}/stat").read().split()[2] != "T":
                time.sleep(0.01)
            os._exit(7)
        if attempt == 2:
            with open("pid.part", "w") as file:
                file.write(str(os.getpid()))
            os.rename("pid.part", "pid")
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
        """,
        "--nproc_per_node 2 --max_restarts 2 --stop_timeout 600 --cold",
    ),
}


def test_restarted_workers_form_their_group_again(finished):
    run = finished("gloo")
    assert run.code == 0, run.err
    assert [line for line in run.log(1).splitlines() if line.startswith("attempt")] == [
        f"attempt {n} sum 2" for n in range(3)
    ]


def test_a_rank_that_only_lost_its_peer_is_not_the_cause(finished):
    first, second = finished("gloo").err.splitlines()[1:]
    assert first == "fleetrun: rank 1: killed by SIGKILL; restart 1 of 2"
    # What follows depends on how long the attempts took.
    assert second.startswith(
        "fleetrun: rank 1: ValueError: the cause, not the consequence (exit code 1); restart 2 of 2"
    )


def test_the_report_shows_the_first_attempt_in_full_and_a_line_for_each_other(finished):
    run = finished("fails three times")
    assert run.code == 1
    assert run.survivors() == []
    assert "rank 1 failed first in attempt 1 of 3: ValueError: first (exit code 1)\n" in run.err
    assert run.err.endswith(
        f"  attempt 2: rank 1: sys.exit(3) at {run.where / 'train.py'}:9 (exit code 3)\n"
        f"  attempt 3: rank 1: exit code 7\n"
    )


def test_the_log_keeps_every_attempt(finished):
    parts = finished("fails three times").log(1).split("\n-------- fleetrun: restart ")
    assert parts[0].startswith("attempt 0\nTraceback")
    for number in (1, 2):
        assert parts[number].startswith(f"{number} of 2, ")
        assert parts[number].endswith(f" --------\nattempt {number}\n")


def test_a_script_that_always_fails_at_once_is_restarted_ever_more_slowly():
    pace = Pace(delay=1)
    assert [pace.wait_after(0.1) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, LONGEST, LONGEST]
    assert pace.wait_after(QUICK) == 0  # it had time to do something
    assert [pace.wait_after(0.1) for _ in range(3)] == [0, 1, 2]
    assert all(wait <= LONGEST for wait in (pace.wait_after(0.1) for _ in range(5000)))
    never = Pace(delay=0)
    assert [never.wait_after(0.1) for _ in range(5)] == [0] * 5


def test_the_wait_is_announced_with_its_reason(finished):
    # The attempts may be slower than QUICK on a busy machine: then there is no wait, and nothing to announce.
    lines = [line for line in finished("fails three times").err.splitlines() if "; restart 2 of 2" in line]
    assert len(lines) == 1
    assert lines[0].endswith(("restart 2 of 2", "restart 2 of 2 in 1 s: 2 attempts in a row failed within 10 s"))

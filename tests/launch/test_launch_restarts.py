"""--max_restarts."""

from __future__ import annotations

RUNS = {
    # torchrun 2.13 fails here three times of four: the new ranks find the old ranks' addresses in the store.
    "gloo": (
        """
        import os, torch, torch.distributed as dist
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("attempt", attempt, "sum", int(total), flush=True)
        if attempt < 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(total)
        dist.destroy_process_group()
        """,
        "--nproc_per_node 2 --max_restarts 3",
    ),
    "in vain": (
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("try " + os.environ["TORCHELASTIC_RESTART_COUNT"])
        time.sleep(60)
        """,
        "--nproc_per_node 2 --max_restarts 2",
    ),
}


def test_three_of_three_restarts_form_their_group_again(finished):
    run = finished("gloo")
    assert run.code == 0, run.err
    assert [line for line in run.log(1).splitlines() if line.startswith("attempt")] == [
        f"attempt {n} sum 2" for n in range(4)
    ]
    assert run.err.splitlines()[1:] == [f"fleetrun: rank 1: killed by SIGKILL; restart {n} of 3" for n in (1, 2, 3)]


def test_the_first_cause_is_that_of_the_first_attempt(finished):
    run = finished("in vain")
    assert run.code == 1
    assert "first cause in attempt 1 of 3 is rank 1: ValueError: try 0 (exit code 1)\n" in run.err
    assert run.err.endswith(
        "  attempt 2: rank 1: ValueError: try 1 (exit code 1)\n  attempt 3: rank 1: ValueError: try 2 (exit code 1)\n"
    )


def test_the_log_keeps_every_attempt(finished):
    log = finished("in vain").log(1)
    parts = log.split("\n-------- fleetrun: restart ")
    assert [part.rstrip().splitlines()[-1] for part in parts] == [f"ValueError: try {n}" for n in range(3)]
    assert parts[1].startswith("1 of 2, ")

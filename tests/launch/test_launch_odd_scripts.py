"""Scripts that behave badly: fleetrun ends with the right code, loses no output, and leaves nothing running."""

from __future__ import annotations

import pytest

RUNS = {
    "exits 0 early": (
        """
        import os, sys
        print("done", os.environ["RANK"])
        if os.environ["RANK"] == "1": os._exit(0)
        sys.exit(0)
        """,
        "--nproc_per_node 2",
    ),
    "forks": (
        """
        import os, sys
        if os.fork() == 0:
            if os.fork() == 0:
                sys.exit(7)  # neither child is the worker
            os.wait()
            sys.exit(8)
        os.wait()
        print("parent")
        """,
        "",
    ),
    "ignores SIGTERM": (
        """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: print("not yet", flush=True))
        open("ready." + os.environ["RANK"], "w").close()
        while not (os.path.exists("ready.0") and os.path.exists("ready.1")): time.sleep(0.01)
        if os.environ["RANK"] == "1": sys.exit(4)
        while True: time.sleep(0.1)
        """,
        "--nproc_per_node 2 --stop_timeout 1",
    ),
    "closes stdout": (
        """
        import os, sys
        os.close(1); os.close(2)
        os.write(os.open("result", os.O_WRONLY | os.O_CREAT), b"worked")
        raise ValueError("nobody will read this traceback in the log")
        """,
        "",
    ),
    "prints binary": (
        """
        import os, sys
        sys.stdout.buffer.write(bytes(range(256)) * 100_000)
        sys.stdout.flush()
        os.write(1, b"\\x1b[31m\\xff\\xfe last line \\x00")
        sys.exit(3)
        """,
        "",
    ),
    "deletes its directory": (
        """
        import os, shutil
        os.makedirs("gone"); os.chdir("gone"); shutil.rmtree(os.getcwd())
        raise ValueError("no directory")
        """,
        "",
    ),
    "deletes the logs": (
        """
        import shutil, sys
        shutil.rmtree("log")
        sys.exit(6)
        """,
        "--max_restarts 1 --cold",
    ),
    "error without text": (
        """
        class Odd(Exception):
            def __str__(self): raise RuntimeError("no text")
        raise Odd("\\ud800" * 10)
        """,
        "",
    ),
    "changes its variables": (
        """
        import os
        for name in list(os.environ): del os.environ[name]
        os.environ["TORCHELASTIC_ERROR_FILE"] = "/proc/nothing"
        raise ValueError("without variables")
        """,
        "",
    ),
}
EXPECTED = {
    "exits 0 early": (0, ""),
    "forks": (0, ""),
    "ignores SIGTERM": (1, "rank 1 failed first: sys.exit(4)"),
    "closes stdout": (1, "rank 0 failed first: ValueError: nobody will read this traceback in the log"),
    "prints binary": (1, "rank 0 failed first: sys.exit(3)"),
    "deletes its directory": (1, "rank 0 failed first: ValueError: no directory"),
    "deletes the logs": (1, "rank 0 failed first in attempt 1 of 2: sys.exit(6)"),
    "error without text": (1, "rank 0 failed first: Odd"),
    "changes its variables": (1, "rank 0 failed first: ValueError: without variables"),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_end_is_the_right_one(finished, name):
    run = finished(name)
    code, message = EXPECTED[name]
    assert run.code == code, run.err
    assert message in run.err
    assert "fleetx/launch" not in run.err  # no traceback of ours
    assert run.survivors() == []


def test_binary_output_is_kept_as_it_is(finished):
    run = finished("prints binary")
    log = (run.where / "log" / "workerlog.0").read_bytes()
    assert log.startswith(bytes(range(256)) * 100_000 + b"\x1b[31m\xff\xfe last line \x00")

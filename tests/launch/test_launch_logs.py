"""Where the output goes."""

from __future__ import annotations

import re

from launching import start, until

WORKER = """
import os, sys
print("out of", os.environ["RANK"], sys.argv[1:], __spec__.name)
print("err of", os.environ["RANK"], file=sys.stderr)
"""

LIVE = """
import os, time
print("first", end="")
while not os.path.exists("go"): time.sleep(0.01)
for n in range(20000): print("line", n)
time.sleep(0.2)
print("last")
"""


def test_every_worker_has_a_log_and_worker_0_is_echoed(tmp_path):
    run = start(tmp_path, WORKER, options="--nproc_per_node 2 -m train", arguments="--lr 0.1 -m x").finish()
    assert run.code == 0, run.err
    logs = [f"out of {n} ['--lr', '0.1', '-m', 'x'] train\nerr of {n}\n" for n in (0, 1)]
    assert [run.log(0), run.log(1)] == logs
    assert run.out == logs[0]
    assert re.fullmatch(
        r"fleetrun: 2 workers on cpu, \d+ threads? each \(OMP_NUM_THREADS\), logs in log/workerlog\.\*\n", run.err
    )


def test_the_echo_is_live_and_optional_and_the_logs_belong_to_one_run(fleetrun, tmp_path):
    (tmp_path / "log").mkdir()
    for name in ("workerlog.0", "workerlog.7", "workerlog.note"):
        (tmp_path / "log" / name).write_text("from an earlier run")
    run = fleetrun(LIVE)
    assert run.process.stdout.read(5) == "first"

    second = start(tmp_path, LIVE).finish()
    assert second.code == 2
    assert second.err == "fleetrun: --log_dir log: another fleetrun is using it; choose another directory\n"

    run.process.stdout.close()  # as in `fleetrun ... | head`
    (tmp_path / "go").touch()
    until(lambda: run.process.poll() is not None, what="fleetrun to exit")
    assert run.code == 0
    assert run.log(0).splitlines() == ["firstline 0", *(f"line {n}" for n in range(1, 20000)), "last"]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["workerlog.0", "workerlog.note"]

"""Where the output goes, and how a script runs."""

from __future__ import annotations

import re

from launching import start, until

RUNS = {
    "plain": (
        """
        import os, sys
        print("out of", os.environ["RANK"])
        print("err of", os.environ["RANK"], file=sys.stderr)
        """,
        "--nproc_per_node 2",
    ),
}

SCRIPT = """
        import inspect, multiprocessing, os, pickle, sys, helper
        class Thing: pass
        def child(queue): queue.put(("child", __name__))
        if __name__ == "__main__":
            queue = multiprocessing.get_context("spawn").Queue()
            process = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
            process.start(); print(*queue.get(timeout=30)); process.join()
            print(type(pickle.loads(pickle.dumps(Thing()))) is Thing, sys.argv, __file__, __spec__, helper.NAME)
            print(sys.modules["__main__"].Thing is Thing, "fleetx" in sys.modules, "torch" in sys.modules)
            print("source", inspect.getsource(Thing).strip())
        """


def test_each_worker_has_a_log_and_the_first_is_echoed(finished):
    run = finished("plain")
    assert run.code == 0
    assert run.out == "out of 0\nerr of 0\n"
    assert [run.log(rank) for rank in (0, 1)] == ["out of 0\nerr of 0\n", "out of 1\nerr of 1\n"]
    assert re.fullmatch(
        r"fleetrun: 2 workers on cpu, \d+ threads? each \(OMP_NUM_THREADS\), logs in log/workerlog\.\*\n", run.err
    )


def test_a_script_sees_what_python_would_show_it(tmp_path):
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'")
    run = start(tmp_path, SCRIPT, arguments="--gpus 3 -- --log_dir x").finish()
    assert run.code == 0, run.err
    assert run.out.splitlines() == [
        "child __mp_main__",
        f"True ['train.py', '--gpus', '3', '--', '--log_dir', 'x'] {tmp_path / 'train.py'} None beside the script",
        "True False False",
        "source class Thing: pass",
    ]


def test_a_module_runs_as_with_python_m(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "name.py").write_text("NAME = 'relative'")
    (tmp_path / "package" / "__main__.py").write_text(
        "import sys; from .name import NAME; print(NAME, __name__, __package__, __spec__.name, sys.argv)"
    )
    run = start(tmp_path, "", options="-m package --lr 0.1 -m x").finish()
    assert run.code == 0, run.err
    file = tmp_path / "package" / "__main__.py"
    assert run.out == f"relative __main__ package package.__main__ {[str(file), '--lr', '0.1', '-m', 'x']}\n"


def test_the_echo_is_live_and_a_second_fleetrun_may_not_write_into_the_same_logs(fleetrun, tmp_path):
    run = fleetrun("print('first', end=''); import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    assert run.process.stdout.read(5) == "first"
    second = start(tmp_path, (tmp_path / "train.py").read_text()).finish()
    assert second.code == 2
    assert second.err == "fleetrun: --log_dir log: another fleetrun is writing there; name another directory\n"
    (tmp_path / "go").touch()
    assert run.finish().code == 0


def test_logs_are_fresh_for_each_run_and_nobody_needs_to_listen(fleetrun, tmp_path):
    (tmp_path / "log").mkdir()
    for name in ("workerlog.0", "workerlog.7", "workerlog.note"):
        (tmp_path / "log" / name).write_text("of an older run")
    run = fleetrun("import time\nfor n in range(20000): print('line', n)\ntime.sleep(0.2); print('last')")
    run.process.stdout.close()  # as in `fleetrun ... | head`
    until(lambda: run.process.poll() is not None, what="the end")
    assert run.code == 0
    assert run.log(0).splitlines() == [*(f"line {n}" for n in range(20000)), "last"]
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["workerlog.0", "workerlog.note"]

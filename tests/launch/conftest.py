from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import launching
import pytest


@pytest.fixture
def fleetrun(tmp_path):
    """fleetrun(script, options=...): start it; whatever still runs at the end of the test is killed."""
    started = []

    def start(script, *, where=tmp_path, **options):
        started.append(launching.start(where, script, **options))
        return started[-1]

    yield start
    for run in started:
        run.destroy()


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """finished(name): the run `name` of the module's RUNS (script, options), once it has ended.

    They run in the background, three at a time, because a run mostly waits.
    """
    pool = ThreadPoolExecutor(3)

    def run(name, script, options):
        return launching.start(tmp_path_factory.mktemp(name), script, options=options).finish()

    runs: dict[str, Future] = {
        name: pool.submit(run, name, script, options) for name, (script, options) in request.module.RUNS.items()
    }
    yield lambda name: runs[name].result(timeout=2 * launching.SECONDS)
    pool.shutdown(cancel_futures=True)

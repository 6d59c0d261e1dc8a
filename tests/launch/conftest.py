from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import launching
import pytest


@pytest.fixture
def fleetrun(tmp_path):
    """fleetrun(script, options=...): start it; what is still there at the end of the test is killed."""
    started = []

    def start(script, *, where=tmp_path, **words):
        started.append(launching.start(where, script, **words))
        return started[-1]

    yield start
    for run in started:
        run.destroy()


@pytest.fixture(scope="module")
def finished(request, tmp_path_factory):
    """finished(name): the run `name` of the module's RUNS (script, options), when it has ended.

    All of them are started in the background, three at a time: most of a run is waiting or importing torch.
    """
    pool = ThreadPoolExecutor(3)

    def whole(name, script, options):
        return launching.start(tmp_path_factory.mktemp(name), script, options=options).finish()

    runs: dict[str, Future] = {
        name: pool.submit(whole, name, script, options) for name, (script, options) in request.module.RUNS.items()
    }
    yield lambda name: runs[name].result(timeout=2 * launching.SECONDS)
    pool.shutdown(cancel_futures=True)

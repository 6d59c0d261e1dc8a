from __future__ import annotations

from functools import partial

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
def finished(request, once):
    """finished(name): the run `name` of the module's RUNS (script, options), once it has ended; one for all workers."""

    def run(name, folder):
        script, options = request.module.RUNS[name]
        return launching.start(folder / "run", script, options=options).finish().ended()

    place = request.module.__name__.rpartition("_")[2]  # short: messages with a long path are cut
    return lambda name: launching.Ended(**once(f"{place}-{name}".replace(" ", "-"), partial(run, name)))

"""Random trainings against the oracle. To repeat one: pytest tests/verify/test_random_cases.py -k '123-'."""

from __future__ import annotations

import os
import time

import pytest
import torch
from random_cases import draw, trained, wanted

from rank_pool import Ranks

CASES = [pytest.param(draw(seed), marks=[pytest.mark.nightly] * (seed >= 12)) for seed in range(60)]
NIGHTLY_SECONDS = float(os.environ.get("FLEETX_RANDOM_SECONDS", "3600"))
FIRST = int(os.environ.get("FLEETX_RANDOM_SEED", time.time() // 86400 * 100_000))  # other cases every day


@pytest.fixture(scope="session")
def pools(ranks, four):
    """One process, and pools of two, three and four ranks; that of three starts when it is needed."""
    made = {1: None, 2: ranks, 4: four}
    yield made
    if 3 in made:
        made[3].stop()


def check(case, pools, folder):
    if case.ranks == 3 and 3 not in pools:
        pools[3] = Ranks(3)
    pool = pools[case.ranks]
    results = [trained(case, folder)] if pool is None else pool.run(trained, case, str(folder))
    found = {name: t for result in reversed(results) for name, t in result.items()}
    expected = wanted(case)
    assert set(found) == set(expected)
    torch.testing.assert_close(found, {k: v.to(found[k].dtype) for k, v in expected.items()}, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_random_training_equals_the_oracle(case, pools, tmp_path):
    check(case, pools, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(NIGHTLY_SECONDS + 600)
def test_random_trainings_for_an_hour(pools, tmp_path):
    start, seed, failed = time.monotonic(), FIRST, {}
    while time.monotonic() - start < NIGHTLY_SECONDS:
        case = draw(seed)
        try:
            check(case, pools, tmp_path)
        except Exception as error:  # of this process; ranks raise a RankError
            failed[case.name] = str(error).strip()[-500:]
            print(f"failed: {case.name}", flush=True)
        seed += 1
    print(f"{seed - FIRST} trainings from seed {FIRST}, {len(failed)} failed")
    assert not failed, "\n\n".join(f"{name}:\n{why}" for name, why in failed.items())

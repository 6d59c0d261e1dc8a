"""Random trainings against the oracle. To repeat one: pytest tests/verify/test_random_cases.py -k '123-'."""

from __future__ import annotations

import os
import time

import pytest
import torch
from random_cases import draw, trained, wanted

SEEDS = range(60)
NIGHTLY_SECONDS = float(os.environ.get("FLEETX_RANDOM_SECONDS", "3600"))
FIRST = int(os.environ.get("FLEETX_RANDOM_SEED", time.time() // 86400 * 100_000))  # other cases every day


def check(case, ranks, four):
    pools = {2: ranks, 4: four}
    results = [trained(case)] if case.ranks == 1 else pools[case.ranks].run(trained, case)
    found = {name: t for result in reversed(results) for name, t in result.items()}
    expected = wanted(case)
    assert set(found) == set(expected)
    torch.testing.assert_close(found, {k: v.to(found[k].dtype) for k, v in expected.items()}, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("case", [draw(seed) for seed in SEEDS], ids=lambda case: case.name)
def test_a_random_training_equals_the_oracle(case, ranks, four):
    check(case, ranks, four)


@pytest.mark.nightly
def test_random_trainings_for_an_hour(ranks, four):
    start, seed, failed = time.monotonic(), FIRST, {}
    while time.monotonic() - start < NIGHTLY_SECONDS:
        case = draw(seed)
        try:
            check(case, ranks, four)
        except AssertionError as error:
            failed[case.name] = str(error).strip()[-500:]
        seed += 1
    assert not failed, "\n\n".join(f"{name}:\n{why}" for name, why in failed.items())

"""What is trained on the device. Not in test_cuda_paths.py, so that `make quick` says what is missing."""

from __future__ import annotations

import cuda_page
from cuda_scenarios import ALONE, SHARDING, TWO_RANKS

from fleetx.strategy.part import every, switch_of


def test_every_switch_is_trained_with_alone():
    switches = {switch_of(part) for part in every().values() if not part.always}
    declared = [switches & set(scenario.strategy) for scenario in (*ALONE, *TWO_RANKS, *SHARDING)]
    alone = {switch for found in declared if len(found) == 1 for switch in found}
    missing = switches - alone - {"auto", "batch"}  # a search of strategies, and a check of sizes on the host
    assert not missing, f"add {', '.join(sorted(missing))} to a list in tests/cuda_paths/cuda_scenarios.py, each alone"


def test_the_page_lists_what_is_run():
    assert cuda_page.PAGE.read_text() == cuda_page.text(), "run tests/cuda_paths/cuda_page.py"

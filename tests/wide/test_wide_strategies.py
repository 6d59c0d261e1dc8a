"""What is trained in wide worlds. Not in test_wide_worlds.py, so that `make quick` says what is missing."""

from __future__ import annotations

from wide_child import STRATEGIES

from fleetx.strategy.part import every, switch_of


def test_every_switch_is_trained_with_alone():
    switches = {switch_of(part) for part in every().values() if not part.always}
    declared = [switches & set(strategy) for strategy in STRATEGIES.values()]
    alone = {switch for found in declared if len(found) == 1 for switch in found}
    missing = switches - alone - {"auto", "batch"}  # a search of strategies, and a check of sizes on the host
    assert not missing, f"add {', '.join(sorted(missing))} to STRATEGIES in tests/wide/wide_child.py, each alone"

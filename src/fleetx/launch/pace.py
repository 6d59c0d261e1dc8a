"""How soon to restart: a script that always fails at once must not restart in a tight loop."""

from __future__ import annotations

QUICK = 10.0  # seconds: an attempt that fails sooner is a quick failure
LONGEST = 60.0  # seconds


class Pace:
    """Restarts at once after the first quick failure, and waits longer and longer after further ones in a row."""

    def __init__(self, *, delay: float):
        self._delay = delay  # before the third quick attempt; doubles from there
        self.quick_failures = 0  # in a row

    def wait_after(self, life: float) -> float:
        """Seconds to wait before a restart, after an attempt that failed `life` seconds after its start."""
        self.quick_failures = self.quick_failures + 1 if life < QUICK else 0
        if self.quick_failures < 2:
            return 0.0
        return min(self._delay * 2.0 ** min(self.quick_failures - 2, 60), LONGEST)

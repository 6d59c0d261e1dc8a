"""How soon to restart: a script that always fails at once must not spin."""

from __future__ import annotations

QUICK = 10.0  # seconds: an attempt that fails sooner has failed at once
LONGEST = 60.0  # seconds


class Pace:
    """The first failure is followed by a restart at once, further ones in a row by longer and longer waits."""

    def __init__(self, *, delay: float):
        self._delay = delay  # before the third quick attempt; doubles from there
        self.quick_failures = 0  # in a row

    def wait_after(self, life: float) -> float:
        """Seconds to wait before a restart, after an attempt that failed `life` seconds after its start."""
        self.quick_failures = self.quick_failures + 1 if life < QUICK else 0
        if self.quick_failures < 2:
            return 0.0
        return min(self._delay * 2.0 ** min(self.quick_failures - 2, 60), LONGEST)

"""What is wrong with the data, and what to do about it."""

from __future__ import annotations

from fleetx.data.checks import check_choice
from fleetx.errors import DataError

ON_ERROR = ("raise", "skip")


class Complaints:
    """Records that cannot be used: the first is an error, unless they are to be skipped."""

    def __init__(self, on_error: str):
        check_choice("on_error", on_error, ON_ERROR)
        self.skip = on_error == "skip"
        self.found: list[str] = []

    def add(self, complaint: str) -> None:
        if not self.skip:
            raise DataError(f'{complaint}. on_error="skip" goes on without such records')
        self.found.append(complaint)

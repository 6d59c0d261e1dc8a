"""What to do about invalid records."""

from __future__ import annotations

from fleetx.data.checks import check_choice
from fleetx.errors import DataError

ON_ERROR = ("raise", "skip")


class RecordErrors:
    """Raises an error for the first invalid record, or collects messages if on_error is "skip"."""

    def __init__(self, on_error: str):
        check_choice("on_error", on_error, ON_ERROR)
        self.skip = on_error == "skip"
        self.messages: list[str] = []

    def add(self, *messages: str) -> None:
        if messages and not self.skip:
            raise DataError(f'{messages[0]}. To leave out invalid records, pass on_error="skip"')
        self.messages += messages

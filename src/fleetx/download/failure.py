"""What can go wrong on the way."""

from __future__ import annotations


class Dropped(Exception):  # noqa: N818  not an error of the user's: the connection failed, and another try may help
    """Never leaves this package: the last try makes a DownloadError of it."""


class Stopped(Exception):  # noqa: N818  nor this: the main thread was interrupted and the others end early
    """Never leaves this package."""

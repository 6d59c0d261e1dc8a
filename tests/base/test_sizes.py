from __future__ import annotations

import pytest

from fleetx.base.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("6GiB", 6 * 2**30), ("800 MB", 800_000_000), ("1.5g", 3 * 2**29), ("4096", 4096), ("2 kib", 2048), ("1B", 1)],
)
def test_bytes_as_people_write_them(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "six", "6 G B", "GiB", "-1GiB", "6XB", "0.5", "0", "0GiB"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(ValueError, match="not a number of bytes"):
        parse_bytes(text)


def test_format_bytes():
    assert [format_bytes(n) for n in (12, 2048, 3 * 2**20, 5 * 2**29)] == ["12 B", "2.0 KiB", "3.0 MiB", "2.500 GiB"]

"""What the local folder remembers, in a folder of its own inside: parts, unpackings, the lock, outcomes."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

from fleetx.paddle.download.listing import RECORDS, Listed


class Records:
    """Paths only, and small json files that are whole or not there."""

    def __init__(self, local: Path):
        self.root = local / RECORDS
        self.lock = self.root / "lock"
        self.beside = self.root / "unpacking"

    def part(self, name: str, md5: str = "no-sum") -> Path:
        """Where a file grows. Another sum is another part: a new version never continues an old one."""
        return self.root / "parts" / f"{name}.{md5}"

    def forget_parts(self, name: str) -> None:
        """Of this file, whichever version."""
        for part in self.part(name).parent.glob("*"):
            if part.stem == Path(name).name and part.is_file():
                part.unlink()

    def unpacked(self, file: Listed) -> Path:
        return self.root / "unpacked" / f"{file.name}.json"

    def outcome(self, key: str) -> Path:
        return self.root / "outcomes" / f"{key}.json"

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """The record, or an empty one: what cannot be read was not written to its end, and counts as not done."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @staticmethod
    def write(path: Path, record: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{uuid.uuid4().hex}")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)

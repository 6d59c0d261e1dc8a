"""The chosen strategy as a YAML file, with which the run can be repeated without a search."""

from __future__ import annotations

from pathlib import Path

import yaml

from fleetx.base.files import write_atomic
from fleetx.errors import UsageError
from fleetx.strategy import DistributedStrategy

MARK = "# chosen by fleetx: strategy.auto"


def check(path: Path) -> None:
    """Raise UsageError before the search if the file cannot be written, or is not a result of auto."""
    if not path.parent.is_dir():
        raise UsageError(f"auto_configs['output'] = {str(path)!r}: the folder does not exist: create it first")
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(MARK.encode())):
        raise UsageError(
            f"auto_configs['output'] = {str(path)!r}: the file exists, and auto did not write it: choose another name"
        )


def write(path: Path, strategy: DistributedStrategy) -> None:
    declared = strategy.declared()
    declared["batch"] = declared.pop("batch_configs")
    write_atomic(path, f"{MARK}\n{yaml.safe_dump(declared, sort_keys=False, default_flow_style=None, width=120)}")

"""The job secret, by which the nodes of a job recognize each other. Read from a file or a variable, never shown."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from fleetx.errors import LaunchError

VARIABLE = "FLEETX_JOB_SECRET"
SHORTEST, LONGEST = 16, 4096  # bytes
_MAKE_ONE = "such as the output of `openssl rand -hex 32`"


def read_secret(file: str | None, *, environ: Mapping[str, str]) -> bytes:
    """From --secret_file or $FLEETX_JOB_SECRET; empty if there is neither."""
    value = environ.get(VARIABLE)
    if file is None and value is None:
        return b""
    if file is not None and value is not None:
        raise LaunchError(f"--secret_file and {VARIABLE} are both given; give only one of the two")
    source = VARIABLE if file is None else f"--secret_file {file}"
    secret = os.fsencode(value or "").strip() if file is None else _from_file(file)
    if not SHORTEST <= len(secret) <= LONGEST:
        raise LaunchError(f"{source}: must have {SHORTEST} to {LONGEST} bytes, {_MAKE_ONE}")
    return secret


def _from_file(file: str) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise LaunchError(f"--secret_file {file}: is not a file")
            if status.st_mode & 0o077:
                raise LaunchError(f"--secret_file {file}: others can read or change it; run `chmod 600 {file}`")
            return opened.read(LONGEST + 2).strip()
    except OSError as error:
        raise LaunchError(f"--secret_file {file}: cannot be read ({error.strerror})") from None
    except ValueError:  # a NUL in the name
        raise LaunchError(f"--secret_file {file!r}: is not the name of a file") from None

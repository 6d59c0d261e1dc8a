from __future__ import annotations

import sys
from pathlib import Path

# Small applications and files of every format, which their own tests are made of.
sys.path += [str(Path(__file__).parents[1] / room) for room in ("applications", "data")]

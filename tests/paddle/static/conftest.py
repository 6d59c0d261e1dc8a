from __future__ import annotations

import sys
from pathlib import Path

# For small_applications and data_files, which the tests of those packages use too.
sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("applications", "data")]

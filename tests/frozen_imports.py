"""The last import of the server that test processes are forked from (`rank_pool.forks`)."""

from __future__ import annotations

import gc
import os

# The server finds this file by PYTHONPATH. Its forks need not.
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
if not os.environ["PYTHONPATH"]:
    del os.environ["PYTHONPATH"]

gc.collect()
gc.freeze()  # or the first collection of each fork would write to, and so copy, every page with an imported object

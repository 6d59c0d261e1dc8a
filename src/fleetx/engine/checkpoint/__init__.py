"""Checkpoints: `fleet.save`, `fleet.load` and what is built on them. docs/design/checkpoints.md describes the format.

manifest.py        the files of a checkpoint, their schema and hashes
snapshot.py        what a rank has to save
write.py, read.py  a checkpoint, written and read by all ranks together
chunks.py          any region of a tensor, from the pieces it was saved in
tensor_file.py     safetensors
tree.py            nested plain data as JSON
"""

from __future__ import annotations

from fleetx.engine.checkpoint.manifest import Training
from fleetx.engine.checkpoint.read import read as load
from fleetx.engine.checkpoint.snapshot import Extras, take
from fleetx.engine.checkpoint.write import write

__all__ = ["Extras", "Training", "load", "take", "write"]

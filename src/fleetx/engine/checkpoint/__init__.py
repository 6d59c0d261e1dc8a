"""Checkpoints: `fleet.save`, `fleet.load` and what is built on them. docs/design/checkpoints.md describes the format.

manifest.py        the files of a checkpoint, their schema and hashes
snapshot.py        what a rank has to save
write.py, read.py  a checkpoint, written and read by all ranks together
together.py        ranks do each phase together: if one fails, all raise its error
restore.py         the second half of a read: applies the checkpoint once everything is checked
random_states.py   the states of the global random number generators
chunks.py          any region of a tensor, from the pieces it was saved in
loop.py            `fleet.checkpoints`
term.py            SIGTERM
branch.py          `fleet.checkpoints` in a short run of `fleetx batch`
folders.py         the checkpoints under a root, which belongs to one run at a time
back.py            restores the last checkpoint after numbers went wrong
background.py      saving in another thread
export.py          `fleet.export`
tensor_file.py     safetensors
hashing_file.py    a file that is hashed while it is written
tree.py            nested plain data as JSON
"""

from fleetx.engine.checkpoint.branch import Branch
from fleetx.engine.checkpoint.export import export
from fleetx.engine.checkpoint.folders import latest
from fleetx.engine.checkpoint.loop import Checkpoints
from fleetx.engine.checkpoint.read import described
from fleetx.engine.checkpoint.read import read as load
from fleetx.engine.checkpoint.snapshot import Extras, take
from fleetx.engine.checkpoint.write import write

__all__ = ["Branch", "Checkpoints", "Extras", "described", "export", "latest", "load", "take", "write"]

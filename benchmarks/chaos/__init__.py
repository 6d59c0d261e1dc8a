"""Everything that can break a training, done to a real one: `python -m benchmarks.chaos`.

worker.py    the training: real strategies on two ranks, every step logged to the last bit
marks.py     what a worker is doing at this moment, for those who want to kill it there
training.py  one training under fleetrun, from outside: its processes, messages, steps and checkpoints
kills.py     `kill -9` of ranks, of fleetrun and of both, in every phase
stalls.py    a stopped rank, a cut link
damage.py    flipped bits, cut off, missing and swapped files
disk.py      a full disk, and every call of a save that can fail; shim.c makes it fail
goodput.py   how much of the time is training if a rank is killed every minute
report.py    the tables
"""

"""The record of a run: facts as JSON lines, the progress table and the trackers.

    schema.py     every kind of line and its keys
    recorder.py   what the engine tells, turned into facts; `fleet.record` makes one, `fleet.metrics()` asks it
    tally.py      what has happened in the round of one model, timed on the host or on the device; and its loss
    stream.py     a thread that writes the lines, and gathers those of the other ranks without a collective
    usage.py      bytes sent and held by this process, in all and in each round
    read.py       a record, read back; no torch
    progress.py   `fleet.progress`: a table on the terminal
    trackers.py   TensorBoard, Weights & Biases, MLflow

The engine knows a `recorder` in its session, which is None if nothing is recorded, and nothing of files.
"""

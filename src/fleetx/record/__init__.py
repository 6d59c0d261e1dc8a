"""The record of a run: facts as JSON lines, the progress table and the trackers.

    schema.py     every kind of line and its keys
    recorder.py   turns what the engine reports into facts; `fleet.record` creates it, `fleet.metrics()` queries it
    tally.py      what happened in a round of one model, timed on the host or on the device; and its loss
    stream.py     a thread that writes the lines, and gathers those of the other ranks without a collective
    usage.py      bytes sent and held by this process, in total and in each round
    read.py       reads a record back; no torch
    progress.py   `fleet.progress`: a table on the terminal
    trackers.py   TensorBoard, Weights & Biases, MLflow

The engine knows nothing about files, only the `recorder` of its session, which is None if nothing is recorded.
"""

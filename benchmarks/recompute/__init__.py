"""What recomputation by a budget of bytes costs and gains, beside torch's own ways.

models.py     the models, from config, and their batches
ways.py       ours and the peers', put into one and the same model, of which one is active at a time
trade.py      the trade-off: peak bytes and time of a step, of all ways in turn
compiled.py   torch.compile's budget beside ours
measured.py   seconds and bytes of a step
batches.py    the largest batch under one limit, and samples a second
report.py     tables and plots
"""

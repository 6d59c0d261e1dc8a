"""What recomputation with a memory budget costs and gains, compared with torch's own methods.

models.py     the models, from config, and their batches
methods.py    ours and torch's, installed in one model; one is active at a time
trade.py      the trade-off: peak memory and time of a step, of all methods in turn
compiled.py   torch.compile's budget next to ours
measured.py   seconds and bytes of a step
batches.py    the largest batch within one limit, and samples per second
report.py     tables and plots
"""

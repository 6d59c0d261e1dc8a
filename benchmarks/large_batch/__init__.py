"""A study: how far can the batch grow at the same number of epochs? python -m benchmarks.large_batch --help

data.py      Fashion-MNIST as tensors in memory
model.py     a small ResNet
recipe.py    what is the same in every run, the four optimizers, and where the search for their rates begins
train.py     one run, on all workers
runs.py      what a run is called, what came of it, and the file that keeps it
sweep.py     which run comes next
worker.py    what fleetrun starts: the whole study, in each worker
summary.py   from runs to accuracies and to the largest batch that keeps them
report.py    the same as tables and as a plot
"""

"""A study: how large can the batch be with the same number of epochs? python -m benchmarks.large_batch --help

data.py      Fashion-MNIST as tensors in memory
model.py     a small ResNet
recipe.py    what all runs share, the four optimizers, and the start of the search for their rates
train.py     one run, on all workers
runs.py      the parameters and the outcome of a run, and the file of all outcomes
sweep.py     which run comes next
worker.py    the script for fleetrun: the entire study, in each worker
summary.py   from runs to accuracies and to the largest batch that keeps the baseline's
report.py    tables and a plot
"""

"""A study: how large can the batch be with the same number of epochs? python -m benchmarks.large_batch --help

tasks.py     images and text: data, model, measure, and what a share of the data is
data.py      Fashion-MNIST as tensors in memory
model.py     a small ResNet
text.py      Python's manual as sequences of characters, and a small transformer
recipe.py    what all runs share, the five optimizers, and the start of the search for their rates and decays
train.py     one run, on all workers
runs.py      the parameters and the outcome of a run, and the file of all outcomes
sweep.py     which run comes next
worker.py    the script for fleetrun: the entire study, in each worker
summary.py   from runs to scores and to the largest share that keeps the baseline's
report.py    tables and a plot
"""

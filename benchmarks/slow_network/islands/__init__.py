"""Two islands of two ranks with a slow link between them: python -m benchmarks.slow_network --only islands

tasks.py      Fashion-MNIST and a small language model
ways.py       the methods, and the settings that each of them tries
diloco.py     torchft's DiLoCo as a method
runs.py       the file of finished runs, and which run comes next
training.py   the workers' side of a training on the unshaped link: scores and bytes
times.py      the workers' side of timing steps on a shaped link
worker.py     the script for fleetrun
command.py    the command line
summary.py    what was reached: scores over the seeds, bytes, and times
report.py     tables and a plot
"""

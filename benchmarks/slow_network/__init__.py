"""What the strategies for slow networks gain, and where they do not: python -m benchmarks.slow_network --help

Three measurements, each in processes of its own on the hosts of a lab (benchmarks/netlab):

steps       the time of a step with gradients of the size of ResNet-50 and BERT-base, every strategy, three rates
task        Fashion-MNIST to the same accuracy and to the same loss
hierarchy   two hosts of two workers, flat and hierarchical

model.py      parameters of given shapes, and a backward that makes gradients up
ways.py       the strategies and their peers, each as a loop: fleetx, or plain DDP with torch's hooks
shaping.py    the rate of a lab's links, changed while processes run on it
clock.py      samples of one way at one rate: seconds, and bytes of the interface
steps.py      what the workers run for steps and hierarchy; task.py: for the task
study.py      the lab around them
summary.py    medians, floors, and when a training got there
goals.py      the goals, and what was reached
report.py     tables, plots and files
"""

"""Strategies for slow networks: what they gain, and where they do not. See python -m benchmarks.slow_network --help

Four measurements, each in its own processes on the hosts of a lab (benchmarks/netlab):

steps       step time with gradients of the size of ResNet-50 and BERT-base, for every strategy at three link rates
task        Fashion-MNIST to the same accuracy and to the same loss
hierarchy   two hosts with two workers each, flat and hierarchical
islands     two trainings on two hosts with two workers each: scores and bytes, and separately times

model.py      parameters of given shapes, with a backward that makes up gradients
methods.py    the strategies and their peers, each as a training loop: fleetx, or plain DDP with torch's hooks
shaping.py    change the rate of a lab's links while processes run on it
clock.py      samples of one method at one rate: seconds, and bytes sent by the interface
steps.py      the workers' side of steps and hierarchy; task.py: of task
islands       a package of its own, see there
study.py      the lab around the workers
timeline.py   where the time of one step goes, stage by stage
simulated.py  the task in one process, for accuracy over several seeds: no lab, no clock
summary.py    medians, lower bounds, and when a training reached its target
goals.py      the goals, and what was reached
report.py     tables and plots

Result files call a method "way" and an evaluation "moment".
"""

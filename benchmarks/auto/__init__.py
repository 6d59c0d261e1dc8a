"""Is what auto predicts true? python -m benchmarks.auto --help

models.py     five models from config, of sizes that a link of 100 Mbit/s can still carry
worker.py     what fleetrun starts: probe, predict, then run many plans for real
report.py     errors, ranks, picks; the page
"""

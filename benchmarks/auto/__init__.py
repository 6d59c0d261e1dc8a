"""How accurate are the predictions of auto? python -m benchmarks.auto --help

models.py     five models from config, small enough for a link of 100 Mbit/s
worker.py     what fleetrun starts: profile, predict, then run many plans for real
report.py     errors, rankings and choices; the tables of the page
"""

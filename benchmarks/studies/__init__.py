"""The tables of docs/results that come from studies. python -m benchmarks.studies --help"""

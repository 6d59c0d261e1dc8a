"""What every benchmark stands on. A benchmark's file imports its names from here.

declare.py     @benchmark, and how the files beside this folder are found
interleave.py  Run, Sides: both sides in turn, in pairs
verdict.py     the samples -> a ratio -> met, not met, or too noisy to say
ranks.py       a function in n processes, bounded in time; rank.py is what they run
machine.py     where and when it was measured
result.py      one benchmark from start to JSON
table.py       what is printed
pages.py       the tables of docs/results
"""

from benchmarks.frame.declare import Benchmark, CannotRunError, benchmark
from benchmarks.frame.interleave import Run, Sides, interleave

__all__ = ["Benchmark", "CannotRunError", "Run", "Sides", "benchmark", "interleave"]

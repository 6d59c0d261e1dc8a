"""Benchmarks: each prints a ratio that was measured side by side in one run. See README.md beside."""

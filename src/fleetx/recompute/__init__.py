"""Segments that are run again: how they are run (chain), where they begin and end (blocks), which are best (budget)."""

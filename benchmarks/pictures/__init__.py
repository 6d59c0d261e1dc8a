"""The three pictures of the README, drawn from the committed JSON of docs/results.

draw.py      lines and bars as SVG, with their names beside them instead of in a legend
figures.py   what each picture shows
__main__.py  writes them
"""

"""`fleetx report`: the page of a run, one self-contained HTML file. Nothing here imports torch.

facts.py     what is drawn, computed from the lines of a record
svg.py       plots and bars as SVG, for the width of a phone
timeline.py  the picture of one step, and the events of a run
sections.py  the sections of the page
usage.py     the sections on memory and network
compare.py   several runs side by side
page.py      the page, and the command
style.py     the style of the page
"""

"""`fleetx report`: the page of a run, one HTML file that needs nothing else. No torch here.

facts.py     what is drawn, computed from the lines of a record
svg.py       plots and bars as SVG, for the width of a phone
timeline.py  the picture of one step, and the events of a run
sections.py  the parts of the page
page.py      the page, its style, and the command
"""

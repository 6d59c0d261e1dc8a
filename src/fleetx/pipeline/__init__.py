"""Models that are cut into stages on different ranks.

placement.py  where the user says which layer is on which stage
survey.py     which modules a forward calls in which stage, and what crosses the borders
balance.py    a cut that makes the stages take equally long
cut.py        what a rank holds after the cut, and weights that several stages share
stages.py     one stage of a forward; torch's own schedules over them
micro.py      a batch becomes micro-batches
timeline.py   the schedule, drawn
"""

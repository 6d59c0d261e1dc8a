"""`fleetx verify`: run every combination of strategies, compare its numbers with one plain process, and observe that
each strategy acts.

    combinations.py    which there are: those that raise an error, and those to run; what is not supported yet
    ranks.py           processes that run one combination after another
    runs.py            one training run on the ranks, under a strategy
    observe.py         what is counted during a run
    oracle.py          the same training in one process, in plain PyTorch and float64
    oracle_updates.py  its update rules: LARS, LAMB, Muon
    judge.py           checks the numbers and effects of one combination
    own_model.py       the same for the user's model and strategy
    command.py         what the command line asks for
    report.py          the matrix as text, HTML and JSON
"""

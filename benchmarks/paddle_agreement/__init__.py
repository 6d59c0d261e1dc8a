"""Do fleetx.optim and the old system compute the same? Both, and the formulas in float64, take the same gradients.

python -m benchmarks.paddle_agreement --paddle-python /path/to/python/with/paddlepaddle==3.3.1

A cross-check by hand, not a benchmark of the frame and not a test: PaddlePaddle is no dependency of fleetx.

    cases.py        what is compared: settings, first parameters, gradients
    formulas.py     the formulas in float64
    ours.py         fleetx.optim
    paddle_side.py  the old system; a script for another interpreter, which imports nothing of this package
    compare.py      the differences
"""

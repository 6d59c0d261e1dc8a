"""Does fleetx.optim compute the same as Paddle? Both, and the formulas in float64, get the same gradients.

python -m benchmarks.paddle_agreement --paddle-python /path/to/python/with/paddlepaddle==3.3.1

Run by hand. It is neither a benchmark of the frame nor a test, because fleetx does not depend on PaddlePaddle.

    cases.py        what is compared: settings, initial parameters, gradients
    formulas.py     the formulas in float64
    ours.py         fleetx.optim
    paddle_side.py  Paddle: a script for another interpreter, which imports nothing from this package
    compare.py      the differences
"""

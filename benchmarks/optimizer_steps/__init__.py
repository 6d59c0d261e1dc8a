"""What optimizers.py measures with.

models.py       the parameter shapes of BERT-base and ResNet-50
stream.py       the unit of time: memory traffic at the speed of this machine
sides.py        the optimizers of fleetx, torch, timm and pytorch_optimizer on such parameters
paddle_peer.py  those of Paddle, in another interpreter, which runs paddle_side.py
tables.py       all results as Markdown tables
"""

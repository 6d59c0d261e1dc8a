"""What optimizers.py measures with.

models.py       the parameter lists of BERT-base and ResNet-50
stream.py       the unit: memory read and written as fast as this machine can
sides.py        the optimizers of fleetx, torch, timm and pytorch_optimizer on such a list
paddle_peer.py  Paddle's, in an interpreter of its own, which runs paddle_side.py
__main__.py     everything, as one table in Markdown
"""

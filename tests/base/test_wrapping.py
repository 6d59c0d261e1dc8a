"""Wrappers around the forward of modules that somebody else has patched."""

from __future__ import annotations

import types

import torch
from torch import nn

from fleetx.base.wrapping import Layer, unwrap, wrap

X = torch.ones(2, 3)


class Other:
    """Has a method that somebody uses as the forward of a module."""

    def forward(self, x):
        assert isinstance(self, Other)
        return x + 5


def doubled(module, inner, args, kwargs):
    return 2 * inner(*args, **kwargs)


def patches(module):
    plain = module.forward
    yield "closure", lambda x: plain(x) + 1
    yield "method", types.MethodType(lambda self, x: nn.Linear.forward(self, x) + 1, module)
    yield "method of another object", Other().forward


def test_a_patch_from_before_runs_under_the_wrapper_and_comes_back():
    module = nn.Linear(3, 3)
    for name, patch in list(patches(module)):
        module.forward = patch
        expected = module(X)
        wrap(module, Layer.MATHEMATICS, doubled)
        assert torch.equal(module(X), 2 * expected), name
        unwrap(module.modules())
        assert module.forward is patch, name
        assert torch.equal(module(X), expected), name


def test_a_patch_from_after_stays():
    module = nn.Linear(3, 3)
    expected = module(X)
    wrap(module, Layer.MATHEMATICS, doubled)
    wrapped = module.forward
    module.forward = patch = lambda x: wrapped(x) + 1
    unwrap(module.modules())
    assert module.forward is patch
    assert torch.equal(module(X), expected + 1)

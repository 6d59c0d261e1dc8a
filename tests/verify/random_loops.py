"""Loops that people write, one step each, for the random trainings."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from fleetx import fleet


def zero_last(model, optimizer, x, y):
    mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def zero_first(model, optimizer, x, y):
    optimizer.zero_grad(set_to_none=False)
    mse_loss(model(x), y).backward()
    optimizer.step()


def zero_middle(model, optimizer, x, y):
    loss = mse_loss(model(x), y)
    model.zero_grad()
    loss.backward()
    optimizer.step()


def told(model, optimizer, x, y):
    fleet.backward(mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def evaluating(model, optimizer, x, y):
    """Forwards without a backward around the step."""
    evaluate(model, x)
    loss = mse_loss(model(x), y)
    loss.backward()
    evaluate(model, x)
    optimizer.step()
    optimizer.zero_grad()
    evaluate(model, x)


def by_closure(model, optimizer, x, y):
    def closure():
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def zero_in_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def erased_by_hand(model, optimizer, x, y):
    loss = mse_loss(model(x), y)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def two_losses(model, optimizer, x, y):
    out = model(x)
    torch.autograd.backward([mse_loss(out, y) / 4, mse_loss(out, y) * 3 / 4])
    optimizer.step()
    optimizer.zero_grad()


def weighted(model, optimizer, x, y):
    """Ranks with shares of different sizes: see `share_of`."""
    fleet.weight(len(x))
    mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def in_halves(model, optimizer, x, y):
    """Two backwards per step."""
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (mse_loss(model(a), b) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def both_forwards_first(model, optimizer, x, y):
    """One backward of two forwards."""
    losses = [mse_loss(model(a), b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    (sum(losses) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def looking(model, optimizer, x, y):
    """Reads gradients that it does not train with, and a norm."""
    loss = mse_loss(model(x), y)
    wanted = [p for p in model.parameters() if p.requires_grad]
    torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    optimizer.zero_grad()


def scheduled(model, optimizer, x, y):
    fleet.forward_backward(x, y, loss_fn=mse_loss)
    optimizer.step()
    optimizer.zero_grad()


def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


LOOPS = {
    f.__name__: f
    for f in (
        zero_last, zero_first, zero_middle, told, evaluating, by_closure, zero_in_closure, erased_by_hand, two_losses,
        weighted, in_halves, both_forwards_first, looking, scheduled,
    )
}  # fmt: skip
HALVES = {"in_halves", "both_forwards_first"}

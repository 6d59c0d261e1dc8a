"""What ranks exchange and how it is coded, simulated in one process: plain PyTorch in float64."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import mse_loss

from training import net, weights


def plain_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def double_net():
    return net().double()


def double_last(model, optimizer, x, y):
    mse_loss(model(x.double()), y.double()).backward()
    optimizer.step()
    optimizer.zero_grad()


class Dense:
    """The mean. Every code below has this interface."""

    def __call__(self, by_rank):
        """The tensors of each rank, as {name: tensor} in the order of the bucket -> their means."""
        return {name: sum(t[name] for t in by_rank) / len(by_rank) for name in by_rank[0]}


class Half:
    def __init__(self, dtype=torch.float16):
        self._dtype = dtype

    def __call__(self, by_rank):
        halves = {name: [(t[name] / len(by_rank)).to(self._dtype) for t in by_rank] for name in by_rank[0]}
        return {name: sum(h[1:], start=h[0]).double() for name, h in halves.items()}


class Quantized:
    """inside: ranks whose values are summed before they are coded."""

    def __init__(self, bits, block, ends, inside=1):
        self._largest, self._block, self._inside = 2 ** (bits - 1) - 1, block, inside
        self._residuals = [{} for _ in range(ends)]

    def _rounded(self, x):
        scale = max((x.abs().max().float() / self._largest).item(), 2**-126)
        return (x / scale).round() * scale

    def __call__(self, by_rank):
        ranks, ends = len(by_rank), len(self._residuals)
        groups = [by_rank[i : i + self._inside] for i in range(0, ranks, self._inside)]
        summed = [{name: sum(t[name] for t in group) for name in group[0]} for group in groups]
        places = [
            (name, start) for name, t in by_rank[0].items() for start in range(0, t.numel(), self._block)
        ]  # of the blocks
        share = math.ceil(len(places) / ends)
        out = {name: torch.zeros_like(t).flatten() for name, t in by_rank[0].items()}
        for row, (name, start) in enumerate(places):
            here = slice(start, start + self._block)
            xs = [
                t[name].flatten()[here] + e.get((name, start), 0) for t, e in zip(summed, self._residuals, strict=True)
            ]
            codes = [self._rounded(x) for x in xs]
            mean = sum(codes) / ranks
            out[name][here] = self._rounded(mean)
            for end, (x, code) in enumerate(zip(xs, codes, strict=True)):
                self._residuals[end][name, start] = x - code
            self._residuals[row // share][name, start] += ranks * (mean - self._rounded(mean))
        return {name: out[name].view_as(t) for name, t in by_rank[0].items()}


class Sparse:
    """The largest values of each large tensor, with what is left accumulated on each rank."""

    def __init__(self, density, smallest, ranks):
        self._density, self._smallest = density, smallest
        self._residuals = [{} for _ in range(ranks)]

    def __call__(self, by_rank):
        out = {}
        for name, first in by_rank[0].items():
            out[name] = torch.zeros_like(first)
            for t, residuals in zip(by_rank, self._residuals, strict=True):
                x = t[name] + residuals.get(name, 0)
                sent = x
                if first.numel() >= self._smallest:
                    k = min(x.numel(), max(1, int(x.numel() * self._density)))
                    chosen = x.abs().flatten().topk(k).indices
                    sent = torch.zeros_like(x).flatten()
                    sent[chosen] = x.flatten()[chosen]
                    sent = sent.view_as(x)
                    residuals[name] = x - sent
                out[name] += sent / len(by_rank)
        return out


class Sharded:
    """Every rank holds a piece of the first dimension of each tensor, and exchanges it with its replicas in a code."""

    def __init__(self, code, names, shards=2):
        """names: of the tensors, in the order in which they are sent."""
        self._codes, self._names = [code() for _ in range(shards)], names

    def __call__(self, by_rank):
        shards = len(self._codes)
        found = [
            code([{name: _shard(t[name], shards, i) for name in self._names if name in t} for t in by_rank])
            for i, code in enumerate(self._codes)
        ]
        return {name: torch.cat([shard[name] for shard in found]) for name in found[0]}


def _shard(t, shards, i):
    pieces = t.chunk(shards)
    return pieces[i] if i < len(pieces) else t[:0]


def data_parallel(data, ranks, code=None, make=double_net, optimizer=plain_sgd):
    """Every rank has its share of each batch.

    DDP's bucket has the parameters in their order in the first step, then in the order in which backward reaches them.
    """
    code, model = code or Dense(), make()
    optimizer = optimizer(model)
    for number, (x, y) in enumerate(data):
        named = list(model.named_parameters())[:: -1 if number else 1]
        by_rank = []
        for a, b in zip(x.chunk(ranks), y.chunk(ranks), strict=True):
            mse_loss(model(a.double()), b.double()).backward()
            by_rank.append({name: p.grad.clone() for name, p in named})
            optimizer.zero_grad()
        for name, grad in code(by_rank).items():
            model.get_parameter(name).grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def local_updates(
    data, ranks, k, code=None, *,
    island=1, fragments=1, lr=1.0, momentum=0.0, share=None, make=double_net, optimizer=plain_sgd,
):  # fmt: skip
    """LocalSGD between islands of ranks, with an outer optimizer.

    fragments: names of parameters that are exchanged together, or 1. Fragment i of n has its first exchange after
    ceil(k * (i + 1) / n) rounds.
    share: the exchange of a period is applied at the end of the next one, to this share.
    """
    code = code or Dense()
    models = [make() for _ in range(ranks // island)]
    optimizers = [optimizer(m) for m in models]
    anchor = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    outer = {name: torch.zeros_like(a) for name, a in anchor.items()}
    fragments = [list(anchor)] if fragments == 1 else fragments
    under_way = [None for _ in fragments]
    due = [1 for _ in fragments]

    def step(mean):
        for name, x in mean.items():
            outer[name] = momentum * outer[name] - x
            anchor[name] = anchor[name] - lr * (momentum * outer[name] - x)

    def exchange(i, names):
        if share is not None and under_way[i] is not None:
            sent, mean = under_way[i]
            step(mean)
            for model, s in zip(models, sent, strict=True):
                for name in names:
                    model.get_parameter(name).add_(anchor[name] - s[name], alpha=share)
        sent = [{name: m.get_parameter(name).clone() for name in names} for m in models]
        mean = code([{name: s[name] - anchor[name] for name in s} for s in sent])
        under_way[i] = sent, mean
        if share is None:
            step(mean)
            for model in models:
                for name in names:
                    model.get_parameter(name).copy_(anchor[name])

    for number, (x, y) in enumerate(data, start=1):
        shares = list(zip(x.double().chunk(ranks), y.double().chunk(ranks), strict=True))
        for i, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            for a, b in shares[i * island : (i + 1) * island]:
                (mse_loss(model(a), b) / island).backward()
            own.step()
            own.zero_grad()
        with torch.no_grad():
            for i, names in enumerate(fragments):
                if number == due[i]:
                    exchange(i, names)
                    due[i] = number + (math.ceil(k * (i + 1) / len(fragments)) if number == 1 else k)
    return [weights(m) for m in models]

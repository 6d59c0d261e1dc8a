"""`fleet.noise_scale`, from norms that `strategy.noise_scale` has kept, and `fleet.trust_ratios`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import torch
from torch import nn

from fleetx.comm import peers
from fleetx.comm.session import current
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError
from fleetx.optim import Lamb, Lars, TrustRatios
from fleetx.parts.noise_scale import NoiseScale
from fleetx.strategy.stage import Stage

LEAST = 8  # measurements


@dataclass(frozen=True)
class NoiseEstimate:
    """The batch at which the noise of the gradient is as large as the gradient. Print it."""

    samples: float  # tr(C) / |G|^2; inf if the gradient cannot be told from the noise
    low: float  # 95 % confidence interval
    high: float
    gradient: float  # |G|^2, the square of the gradient without noise
    noise: float  # tr(C), the variance of the gradient of one sample
    measurements: int
    feed: int  # samples of a measured step on one rank, on average
    confidence: float = 0.95

    def __str__(self) -> str:
        high = "no upper bound: measure more updates" if math.isinf(self.high) else f"{self.high:.3g}"
        return (
            f"gradient noise scale: {self.samples:.3g} samples ({self.confidence:.0%} confidence: {self.low:.3g} to "
            f"{high}), from {self.measurements} updates"
        )


def noise_scale(*, feed: int | None = None, model: nn.Module | None = None) -> NoiseEstimate:
    """The gradient noise scale over the last updates that `strategy.noise_scale` has measured, in samples.

    Below it, a batch twice as large needs about half as many updates; far above it, larger batches hardly help. It
    grows during training, and it is known to mislead for adaptive optimizers: `fleetx batch` measures the critical
    batch itself. Every worker must call it.

    feed: samples of every step on one worker; by default, those of each forward, counted by the first dimension. Pass
    it if a step calls the model more than once.
    """
    engine: Engine = current().find(model)
    part = next((p for p in engine.plan.parts if isinstance(p, NoiseScale)), None)
    if part is None:
        raise UsageError("fleet.noise_scale() needs norms of gradients: turn strategy.noise_scale on")
    ctx = engine.context_of(part)
    group, state = ctx.replica_group, ctx.state
    if group.size == 1 and not ctx.plan.at(Stage.GATE):
        raise UsageError(
            "the noise scale cannot be measured here: it needs gradients of two batch sizes, but there is one replica "
            "of the model and no gradient_merge. Start more workers, or set gradient_merge with k_steps of 2 or more"
        )
    if state["count"] < LEAST:
        weighted = " (fleet.weight with noise_scale is not supported yet)" if engine.weights.used else ""
        raise UsageError(
            f"the noise scale needs {LEAST} measured updates, and there are {state['count']}{weighted}: train longer, "
            f"or measure more often (noise_scale_configs['every'] = {part.every})"
        )
    peers.meet("fleet.noise_scale")
    squares = state["squares"][: len(state["steps"])]
    rows = torch.cat([squares, squares.new_tensor(state["shares"])], 1)
    if group.size > 1:
        group.sum(rows)
    means, steps = (rows / group.size).cpu().tolist(), state["steps"]
    if feed is not None:
        return estimate([row[:2] for row in means], [(feed, feed * n) for n in steps])
    known = [(row, n) for row, n in zip(means, steps, strict=True) if not math.isnan(row[2])]
    if len(known) < LEAST:
        raise UsageError(
            f"in {len(means) - len(known)} of {len(means)} measured updates the number of samples is not known, "
            "because the model was called several times in one step, or never on one worker: pass feed=..., the "
            "samples of every step on one worker, and evaluate under torch.no_grad()"
        )
    # The variance of a mean over steps is the sum of theirs, divided by the square of their number.
    sizes = [(1 / first, n**2 / (every * group.size)) for (_, _, first, every), n in known]
    return estimate([row[:2] for row, _ in known], sizes)


def estimate(squares: Sequence[Sequence[float]], sizes: Sequence[tuple[float, float]]) -> NoiseEstimate:
    """squares: for each measured update, |gradient|^2 of a small and of a big batch; sizes: the samples of these.

    Each pair gives an unbiased estimate of |G|^2 and of tr(C) (McCandlish et al. 2018, appendix A.1). The interval of
    the ratio of their means is Fieller's, which is unbounded where |G|^2 cannot be told from 0.
    """
    pairs = list(zip(squares, sizes, strict=True))
    gradients = [(b * big - a * small) / (b - a) for (small, big), (a, b) in pairs]
    noises = [(small - big) / (1 / a - 1 / b) for (small, big), (a, b) in pairs]
    n, feed = len(pairs), round(fmean(a for a, _ in sizes))
    g, s = fmean(gradients), fmean(noises)
    gg = sum((x - g) ** 2 for x in gradients) / (n - 1) / n  # variances of the means
    ss = sum((x - s) ** 2 for x in noises) / (n - 1) / n
    gs = sum((x - g) * (y - s) for x, y in zip(gradients, noises, strict=True)) / (n - 1) / n
    low, high = _fieller(s, g, ss, gg, gs, _student(0.975, n - 1))
    return NoiseEstimate(max(s, 0.0) / g if g > 0 else math.inf, low, high, g, s, n, feed)


def _fieller(s: float, g: float, ss: float, gg: float, gs: float, t: float) -> tuple[float, float]:
    """All r >= 0 for which s - r g is within t standard errors of 0."""
    a, b, c = g * g - t * t * gg, s * g - t * t * gs, s * s - t * t * ss
    inside = b * b - a * c
    if a > 0:  # |G|^2 is certainly above 0
        root = math.sqrt(max(inside, 0.0))
        return max((b - root) / a, 0.0), max((b + root) / a, 0.0)
    if inside <= 0 or c <= 0:  # nothing is certain
        return 0.0, math.inf
    return max((b - math.sqrt(inside)) / a, (b + math.sqrt(inside)) / a, 0.0), math.inf


def _student(share: float, freedom: int) -> float:
    """The quantile of Student's t, expanded around the normal one; exact to 1 % from 7 degrees of freedom on."""
    z = NormalDist().inv_cdf(share)
    terms = [(z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384]
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


def trust_ratios(*, model: nn.Module | None = None) -> TrustRatios:
    """Record the trust ratios of `lars` or `lamb` from now on: by how much each tensor's rate differs from `lr`.

    Print the result after an update for a histogram, or call its `values()`; `close()` ends the recording. Tensors
    that only other workers hold, as in a pipeline, are missing. Nothing waits for the device until you ask.
    """
    engine: Engine = current().find(model)
    if not isinstance(engine.optimizer, Lars | Lamb):
        raise UsageError("fleet.trust_ratios() needs LARS or LAMB: turn strategy.lars or strategy.lamb on")
    made = TrustRatios(engine.optimizer, engine.names)
    engine.undo.append(made.close)
    return made

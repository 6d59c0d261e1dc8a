from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.futures import Future

from fleetx.engine.context import Outgoing, StepContext
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import Half, Part, settings
from fleetx.strategy.stage import Stage, at


@settings
class FP16AllReduce(Part):
    """Send what the ranks exchange in half precision, and apply it in float32.

    x <- fp32(sum over ranks of half(x / ranks)), where x is a gradient, or under localsgd how far a rank's parameters
    have moved since the last average. The backend also sums in half precision.
    Neutral: one rank, where nothing is sent. With several ranks it always rounds.
    """

    dtype: Half = "float16"
    """The type on the wire. bfloat16 has the range of float32 but fewer digits."""

    dense: ClassVar[bool] = True
    neutral: ClassVar[dict[str, str]] = {}
    effect: ClassVar[Effect] = less("bytes_sent", "fewer bytes are sent", than=0.8, in_part=0.97)
    rounding: ClassVar[float] = 5e-3
    costs: ClassVar[str] = "network: half; time: two casts per bucket; precision: 11 bits (8 with bfloat16)"

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield Offer({"dtype": "bfloat16"}, "bf16")
            yield Offer({"dtype": "float16"}, "lossy")

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and ctx.network.world.size == 1:
            yield "no effect here: there is one replica of the model, so nothing is sent"

    def cost(self, terms: CostTerms) -> None:
        terms.sent, terms.dtype = terms.sent / 2, self.dtype
        terms.streamed_per_exchange += 5 * terms.gradients  # divided, cast, cast back

    @at(Stage.WIRE)
    def send(self, bucket: Outgoing, ctx: StepContext) -> Future[Tensor]:
        """average what the ranks exchange, in half precision on the wire"""
        half = torch.float16 if self.dtype == "float16" else torch.bfloat16
        buffers = ctx.notes.setdefault("buffers", {})
        sent = buffers.get(bucket.index) if bucket.undoable else None  # other exchanges may last longer than a step
        if sent is None or sent.shape != bucket.buffer.shape:  # DDP rebuilds its buckets after the first step
            sent = torch.empty_like(bucket.buffer, dtype=half)
        if bucket.undoable:
            buffers[bucket.index] = sent
        # Divide in float32, so that the sum does not overflow.
        torch.div(bucket.buffer, bucket.network.parties, out=bucket.buffer)
        sent.copy_(bucket.buffer)
        buffer = bucket.buffer  # not the bucket: see Path.sum
        return bucket.network.sum(sent, bucket.index).then(lambda future: buffer.copy_(future.value()))

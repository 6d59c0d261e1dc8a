from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future

from fleetx.base.worker_thread import WorkerThread
from fleetx.comm.paths import Path
from fleetx.engine.context import Outgoing, SetupContext, StepContext
from fleetx.errors import UsageError
from fleetx.parts._blocks import BlockLayout, decode, decode_add, encode_in_place, row_bytes
from fleetx.strategy.compose import Plan
from fleetx.strategy.cost_model import Cluster, CostTerms, Offer
from fleetx.strategy.effect import Effect, less
from fleetx.strategy.part import Part, settings
from fleetx.strategy.stage import Fact, Stage, at

Residuals = dict[str, Tensor]
PASSES = 22  # reads or writes of every value, to encode it twice and decode it


def _codes(part: QuantizedAllReduce) -> bool:
    return part.bits < 32


@settings
class QuantizedAllReduce(Part):
    """Send what the ranks exchange in blocks of 8 or 4 bits, and keep what is rounded off for the next exchange.

    x = g + e, where g is a gradient, or under localsgd how far this rank's parameters have moved. Every rank sends each
    rank its share of the blocks of x, averages the share that it received, and sends the mean to all: q(x), then
    q(mean). e <- x - q(x), plus ranks * (mean - q(mean)) on the rank that averaged, so nothing is lost.
    Neutral: bits=32, where nothing is encoded.
    """

    bits: Literal[4, 8, 32] = 8
    """Bits per value on the wire. 32: send values unchanged."""
    block: Annotated[int, Field(ge=2, multiple_of=2)] = 256
    """Number of values that share a 32-bit scale."""

    neutral: ClassVar[dict[str, Any]] = {"bits": 32}
    per_rank_state: ClassVar[bool] = True
    dense: ClassVar[bool] = True
    own_per_parameter: ClassVar[tuple[str, ...]] = ("residual",)
    effect: ClassVar[Effect] = less("bytes_sent", "fewer bytes are sent", than=0.8, in_part=0.97)
    lossless: ClassVar[dict[str, Any]] = {"bits": 32}
    costs: ClassVar[str] = (
        "network: bits / 32 + 1 / block; memory: a copy of the parameters, two while gradients are sent"
    )

    @classmethod
    def offers(cls, cluster: Cluster) -> Iterator[Offer]:
        if cluster.ranks > 1:
            yield Offer({"bits": 8}, "lossy")

    def cost(self, terms: CostTerms) -> None:
        if _codes(self):
            terms.sent *= row_bytes(self.block, self.bits) / self.block / 4
            terms.streamed_per_exchange += PASSES * terms.gradients

    def keeps(self, params: Iterable[Tensor], plan: Plan) -> int:
        return sum(p.nbytes for p in params) * _codes(self)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and ctx.network.world.size == 1:
            yield "no effect here: there is one replica of the model, so nothing is sent"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"residual": {}} if _codes(self) else {}  # e by parameter name, once something was rounded off

    def belongs_to_rank(self, state: Mapping[str, Any]) -> bool:
        return bool(state.get("residual"))

    # --- acts -------------------------------------------------------------------------------------
    @at(Stage.MODEL, when=_codes)
    def set_up(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """set up a process group for encoded values"""
        ctx.network.messages = True
        ctx.notes["thread"] = ctx.network.new_thread("blocks")
        return model

    @at(Stage.WIRE, makes={Fact.RESIDUAL}, when=_codes)
    def send(self, bucket: Outgoing, ctx: StepContext) -> Future[Tensor]:
        """average what the ranks exchange in blocks of few bits, and keep what is rounded off for the next exchange"""
        if bucket.undoable:
            sent = ctx.in_progress.setdefault("sent", {})  # the round in which each parameter was last sent
            if any(sent.get(name) == ctx.round for name in bucket.names):
                raise UsageError(
                    "quantized_allreduce: a second backward before optimizer.step() cannot work, because what was "
                    "rounded off in the first is kept until the step: use strategy.gradient_merge, with a step after "
                    "each backward"
                )
            sent.update(dict.fromkeys(bucket.names, ctx.round))
        # Look these up now: an exchange that is still running when a checkpoint is loaded must not change its state.
        thread, residuals, in_progress = ctx.notes["thread"], ctx.state["residual"], ctx.in_progress
        return thread.submit(lambda: self._average(bucket, thread, residuals, in_progress))

    def _average(
        self, bucket: Outgoing, thread: WorkerThread, residuals: Residuals, in_progress: dict[str, Any]
    ) -> Future[Tensor]:
        """Encode and decode whole buckets on this thread, while the network's thread sends others."""
        network, path = bucket.network, bucket.network.path(bucket.index)
        layout = BlockLayout([g.numel() for g in bucket.gradients], self.block, path.ends)
        dtype = torch.promote_types(bucket.buffer.dtype, torch.float32)
        blocks = layout.blocks(bucket.gradients, dtype)
        path.inward(blocks)
        if path.leads:
            for values, name in zip(layout.values(blocks), bucket.names, strict=True):
                if name in residuals:
                    values.add_(residuals[name].reshape(-1), alpha=bucket.factor)
            rows = encode_in_place(blocks, self.bits)
        else:
            rows = blocks.new_empty(layout.rows, row_bytes(self.block, self.bits), dtype=torch.uint8)

        def travel() -> Future[Tensor]:
            coded = rows
            if path.leads:
                coded = path.collect(self._share(path, rows, blocks, network.parties))
            path.outward(coded)
            return thread.submit(lambda: finish(coded))

        def finish(coded: Tensor) -> Tensor:
            if path.leads:
                kept = zip(bucket.gradients, layout.values(blocks.div_(bucket.factor)), strict=True)
                new = dict(zip(bucket.names, (values.view_as(g) for g, values in kept), strict=True))
                if bucket.undoable:
                    in_progress.setdefault("new", {}).update(new)
                else:
                    _keep(new, residuals)
            for g, values in zip(bucket.gradients, layout.values(decode(coded, self.bits, dtype)), strict=True):
                g.copy_(values.view_as(g))
            return bucket.buffer

        return network.thread.submit(travel)

    def _share(self, path: Path, rows: Tensor, blocks: Tensor, ranks: int) -> Tensor:
        """Average this rank's share of the blocks, and encode it. What is rounded off is added to the blocks."""
        first, *others = path.swap(rows).view(path.ends, -1, rows.shape[1])
        share = decode(first, self.bits, blocks.dtype)
        for other in others:
            decode_add(other, self.bits, share)
        coded = encode_in_place(share.div_(ranks), self.bits)
        blocks.view(path.ends, -1, self.block)[path.end].add_(share, alpha=ranks)
        return coded

    @at(Stage.PARAMETER, when=_codes)
    def keep_residuals(self, params: list[Tensor], ctx: StepContext) -> None:
        """keep what was rounded off, unless the update was skipped"""
        new = ctx.in_progress.pop("new", {})
        if ctx.updated:
            _keep(new, ctx.state["residual"])


def _keep(new: Mapping[str, Tensor], residuals: Residuals) -> None:
    """Keep copies, because the new values are views of whole buckets."""
    for name, values in new.items():
        residuals[name] = residuals[name].copy_(values) if name in residuals else values.clone()

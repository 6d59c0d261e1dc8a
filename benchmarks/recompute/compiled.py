"""torch.compile's activation_memory_budget next to ours, on a transformer that compiles in a minute.

Compiled code is fused and faster, so absolute times must not be compared: what is compared is what recomputation adds,
each relative to its own baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from benchmarks.frame import CannotRunError
from benchmarks.recompute import measured, methods
from benchmarks.recompute.measured import Row
from fleetx.measure.fake_step import TrainingStep
from fleetx.parts.recompute import budget

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
TITLE = "BERT of 6 layers of 256, sequence 128, batch 16"
CONFIG = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 1024,
          "vocab_size": 1000, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}  # fmt: skip


class Summed(nn.Module):
    """The encoder with a simple loss, so that only the layers matter."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        self.bert = BertModel(BertConfig(**CONFIG), add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.bert(input_ids).last_hidden_state.square().mean()}


class Out:
    """Like the outputs of transformers."""

    def __init__(self, values: dict[str, torch.Tensor]):
        self.loss = values["loss"]


class Called(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: torch.Tensor) -> Out:
        return Out(self.inner(**inputs))


def rows(rounds: int) -> Iterator[Row]:
    inputs = {"input_ids": torch.randint(0, 1000, (16, 128), generator=torch.Generator().manual_seed(1))}
    peaks: list[int] = []
    plain: list[float] = []
    for share in BUDGETS:
        torch._dynamo.reset()
        module = Called(_compiled(share))
        optimizer = measured.adamw(module)
        method = methods.Method(f"compile {share}", f"torch.compile, activation_memory_budget {share:g}", nullcontext)
        peaks.append(measured.peak(module, optimizer, inputs, method.active))
        times = measured.seconds(module, inputs, [method], rounds)[method.name]
        plain = plain or times
        yield {"way": method.name, "title": method.title, "peak": peaks[-1], "seconds": times, "without": plain}
    module = Summed()
    optimizer = measured.adamw(module)
    step = TrainingStep(module, optimizer, kwargs=inputs)
    planner = budget.Planner(step)
    fixed, least = planner.plain, planner.choose("min").peak
    limits = sorted({max(least, peak) for peak in peaks[1:]} | {least}, reverse=True)
    chosen = [methods.ours(module, planner, f"{limit}B", f"{limit / 2**20:.1f} MiB") for limit in limits]
    called = Called(module)
    active = [methods.plain(), *chosen]
    times_of = measured.seconds(called, inputs, active, rounds)
    for method in active:
        peak = measured.peak(called, optimizer, inputs, method.active)
        yield {"way": method.name, "title": method.title, "peak": peak,
               "seconds": times_of[method.name], "without": times_of["plain"], "fixed": fixed.fixed}  # fmt: skip


def _compiled(share: float) -> nn.Module:
    import torch._functorch.config as config

    with config.patch(activation_memory_budget=share):
        made: nn.Module = torch.compile(Summed())  # type: ignore[assignment]
        try:
            out = made(input_ids=torch.randint(0, 1000, (16, 128)))
            out["loss"].backward()
        except Exception as error:  # there is no compiler, or it fails on this machine
            raise CannotRunError(f"torch.compile does not work here: {error}") from None
    made.zero_grad()
    return made

"""Where stages may begin: the trace, which runs the forward in stages, accepts every point that the graph allows."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from fleetx import StrategyError
from fleetx.base.wrapping import unwrap
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.world import World
from fleetx.measure.fake_step import TrainingStep
from fleetx.parts.pipeline import trace
from fleetx.parts.pipeline.cut_points import find_cut_points
from fleetx.parts.pipeline.stage_params import StageParams

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


class Skips(nn.Module):
    """Residual blocks around a chain: stages may begin between the blocks, but not inside them."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

        def forward(self, x):
            return x + self.net(x)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


class InPlace(nn.Module):
    """Activations that modify their input, as in torchvision."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.c(self.relu(self.b(self.relu(self.a(x))))).sum()


class Twice(nn.Module):
    """Modules that are called twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.b(self.a(torch.relu(self.b(self.a(x))))).sum()


class Looked(nn.Module):
    """The first module makes a mask without a gradient, which the last one gets."""

    class Masked(nn.Module):
        def forward(self, x, mask):
            return x * mask

    class Mask(nn.Module):
        def forward(self, x):
            return (x > 0).float()

    def __init__(self):
        super().__init__()
        self.mask, self.last = self.Mask(), self.Masked()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        mask = self.mask(x)
        return self.last(self.b(self.a(x)), mask).sum()


class Frozen(Skips):
    """The first block is frozen: the next one adds a tensor without a gradient."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)


class Quiet(nn.Module):
    """A module that runs under no_grad, whose output is read again later."""

    def __init__(self):
        super().__init__()
        self.backbone, self.a, self.b = (nn.Linear(6, 6) for _ in range(3))
        self.last = nn.Bilinear(6, 6, 2)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.last(self.b(self.a(features)), features).sum()


class Idle(nn.Sequential):
    """With modules that compute nothing."""

    def __init__(self):
        super().__init__(nn.Linear(6, 6), nn.Identity(), nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 6))


def words(batch=2, length=8):
    ids = torch.randint(0, 50, (batch, length))
    return {"input_ids": ids, "labels": ids}


def image(side=32):
    return {"pixel_values": torch.randn(2, 3, side, side), "labels": torch.zeros(2, dtype=torch.long)}


def vector():
    return {"x": torch.randn(2, 6)}


def one():
    return {"input": torch.randn(2, 6)}


MODELS = {
    "bert": (lambda: BertForMaskedLM(BertConfig(vocab_size=50, **SMALL)), words),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2)), words),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(vocab_size=50, use_cache=False, **SMALL)), words),
    "t5": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, use_cache=False,
                     decoder_start_token_id=0)
        ),
        words,
    ),
    "vit": (lambda: ViTForImageClassification(ViTConfig(image_size=32, patch_size=16, **SMALL)), image),
    "resnet": (
        lambda: ResNetForImageClassification(
            ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="bottleneck")
        ),
        image,
    ),
    "skips": (Skips, vector),
    "in place": (InPlace, vector),
    "twice": (Twice, vector),
    "looked": (Looked, vector),
    "frozen": (Frozen, vector),
    "quiet": (Quiet, vector),
    "idle": (Idle, one),
}  # fmt: skip

EXPECTED = {  # among others
    "bert": ["bert.encoder.layer.1", "bert.encoder.layer.2", "cls"],
    "gpt2": ["transformer.h.1", "transformer.h.2"],
    "llama": ["model.layers.1", "model.layers.2"],
    "t5": ["encoder.block.1"],
    "vit": [],  # its layers have other names in other versions, so they are counted below
    "resnet": ["resnet.encoder.stages.1"],
    "skips": ["blocks.1", "blocks.2"],
    "in place": ["b", "c"],
    "twice": [],
    "looked": [],
    "frozen": ["blocks.2"],
    "quiet": ["last"],
    "idle": ["1", "3"],
}


@cache
def found(name):
    """The model, its inputs, and the names of the modules with which a stage may begin."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, inputs = make(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, starts = find_cut_points(TrainingStep(model, optimizer, kwargs=inputs), timed=False)
    return model, inputs, list(starts.values())


def accepted(model, inputs, start):
    """Does the trace, which a pipeline makes before it cuts, agree?"""
    units = trace.map_stages(model, [start], lambda: model(**inputs))
    params = StageParams(model, units, lambda stage: 0, World(ProcessInfo(), torch.device("cpu")))

    def run(interceptor):
        params.interceptor = interceptor
        try:
            model(**inputs)
        finally:
            params.interceptor = None

    try:
        trace.trace(units, torch.device("cpu"), run)
    except StrategyError:
        return False
    finally:
        unwrap(model.modules())
    return True


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_can_begin_wherever_the_graph_allows(name):
    model, inputs, starts = found(name)
    for start in starts:
        assert accepted(model, inputs, start), start


@pytest.mark.parametrize("name", MODELS)
def test_models_are_cut_between_their_layers(name):
    _, _, names = found(name)
    for wanted in EXPECTED[name]:
        assert any(start == wanted or start.startswith(f"{wanted}.") for start in names), (wanted, names)
    if name == "vit":
        assert len(names) >= 3


def test_a_stage_may_begin_inside_a_residual_block_only_if_it_adds_the_batch_itself():
    assert found("skips")[2] == ["blocks.0.net.1", "blocks.0.net.2", "blocks.1", "blocks.2"]


def test_modules_that_compute_nothing_are_not_listed_twice():
    assert found("idle")[2] == ["1", "3"]


def test_what_is_frozen_or_runs_without_gradients_crosses_too():
    assert not [start for start in found("frozen")[2] if ".net" in start]
    assert found("quiet")[2] == ["last"]


def test_a_tensor_without_a_gradient_that_bypasses_a_module_counts_too():
    assert found("looked")[2] == ["last"]

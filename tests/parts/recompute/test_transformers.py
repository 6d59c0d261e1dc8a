"""Unmodified models of `transformers` train the same under a budget, bit for bit."""

from __future__ import annotations

import pytest
import torch

from covering import covering
from fleetx import fleet
from training import assert_equal, sgd, weights

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def bert():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SMALL, vocab_size=64))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**SMALL, image_size=32, patch_size=8))


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]))


def inputs(make):
    generator = torch.Generator().manual_seed(5)
    if make in (bert, gpt2):
        ids = torch.randint(0, 64, (8, 32), generator=generator)
        return {"input_ids": ids, "labels": ids}
    return {"pixel_values": torch.randn(8, 3, 32, 32, generator=generator), "labels": torch.zeros(8, dtype=torch.long)}


def train(make, declared):
    fleet.init()
    torch.manual_seed(0)
    model = make().train()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    torch.manual_seed(1)
    for _ in range(2):
        model(**inputs(make)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize(("make", "share"), covering([bert, gpt2, vit, resnet], [0.95, "min"], strength=1))
def test_they_train_the_same(make, share):
    assert_equal(train(make, {"recompute": {"memory_budget": share}}), train(make, {}))

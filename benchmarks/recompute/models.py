"""Models from config, without downloads, and batches of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base.module_names import matches


@dataclass(frozen=True)
class Model:
    name: str
    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]  # by the batch size
    blocks: tuple[str, ...]  # patterns of the modules that people call the blocks of this model
    batch: int  # for the trade-off

    def present(self) -> list[str]:
        """The patterns that match a module of the model."""
        names = [name for name, _ in self.make().named_modules()]
        return [pattern for pattern in self.blocks if matches(pattern, names)]


def _tokens(words: int, length: int) -> Callable[[int], dict[str, Tensor]]:
    def inputs(batch: int) -> dict[str, Tensor]:
        ids = torch.randint(0, words, (batch, length), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    return inputs


def _images(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "pixel_values": torch.randn(batch, 3, 224, 224, generator=generator),
        "labels": torch.randint(0, 2, (batch,), generator=generator),
    }


def _bert(**settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        return _seeded(lambda: BertForMaskedLM(BertConfig(**settings)))

    return make


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _seeded(lambda: ResNetForImageClassification(ResNetConfig()))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _seeded(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False)))


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return _seeded(lambda: ViTForImageClassification(ViTConfig()))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train()


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
BERT_BLOCKS = ("bert.encoder.layer.*",)

MODELS = {
    model.name: model
    for model in (
        Model("resnet", "ResNet-50, 224 x 224", _resnet, _images,
              ("resnet.embedder", "resnet.encoder.stages.*.layers.*"), 16),
        Model("bert", "BERT-base, sequence 128", _bert(), _tokens(30000, 128), BERT_BLOCKS, 8),
        Model("gpt2", "GPT-2 small, sequence 128", _gpt2, _tokens(50000, 128), ("transformer.h.*",), 8),
        Model("vit", "ViT-base, 224 x 224", _vit, _images, ("vit.encoder.layer.*", "vit.layers.*"), 8),
        Model("bert_large", "BERT-large, sequence 512", _bert(**LARGE), _tokens(30000, 512), BERT_BLOCKS, 1),
    )
}  # fmt: skip

"""Models from config, without a download: as wide as the real ones, with fewer layers and a smaller vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    title: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Tensor]]
    samples: int  # in the batch that is profiled
    total: int  # the global batch


def _tokens(words: int, length: int) -> Callable[[int], dict[str, Tensor]]:
    def inputs(batch: int) -> dict[str, Tensor]:
        ids = torch.randint(0, words, (batch, length), generator=torch.Generator().manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    return inputs


def _images(size: int) -> Callable[[int], dict[str, Tensor]]:
    def inputs(batch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {
            "pixel_values": torch.randn(batch, 3, size, size, generator=generator),
            "labels": torch.randint(0, 2, (batch,), generator=generator),
        }

    return inputs


def _transformers(kind: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return made.train()

    return make


class Huge(nn.Module):
    """Few layers, many parameters."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), labels)


def _vectors(batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(batch, 2048, generator=generator),
            "labels": torch.randint(0, 10, (batch,), generator=generator)}  # fmt: skip


SHORT = {"vocab_size": 2000, "num_hidden_layers": 4}
MODELS = {
    "resnet": Model("ResNet-50, 64 x 64", _transformers("ResNetForImageClassification", "ResNetConfig"),
                    _images(64), 8, 16),
    "bert": Model("BERT-base, 4 layers, sequence 64", _transformers("BertForMaskedLM", "BertConfig", **SHORT),
                  _tokens(2000, 64), 8, 16),
    "gpt2": Model("GPT-2 small, 4 layers, sequence 64",
                  _transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=2000, n_layer=4, use_cache=False),
                  _tokens(2000, 64), 8, 16),
    "vit": Model("ViT-base, 4 layers, 112 x 112",
                 _transformers("ViTForImageClassification", "ViTConfig", num_hidden_layers=4, image_size=112),
                 _images(112), 8, 16),
    "mlp": Model("MLP, 4 layers of 2048", lambda: Huge(2048, 4), _vectors, 64, 128),
    "bert_base": Model("BERT-base, sequence 128", _transformers("BertForMaskedLM", "BertConfig"),
                       _tokens(30000, 128), 4, 8),
}  # fmt: skip
STUDIED = ("resnet", "bert", "gpt2", "vit", "mlp")

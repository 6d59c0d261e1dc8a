"""Applications that are small enough for a test, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetx import applications

WORDS, LENGTH, ROWS = 40, 12, 8


def resnet(**options: Any) -> applications.Resnet50:
    options = {"layers": (1, 2), "hidden": 4, "image_size": 32, "num_classes": 10} | options
    return applications.Resnet50(**options)


def vgg(**options: Any) -> applications.VGG16:
    options = {"layers": (1, 2), "hidden": 4, "ffn": 16, "image_size": 16, "num_classes": 10} | options
    return applications.VGG16(**options)


def bert(**options: Any) -> applications.BertBase:
    options = {"layers": 3, "hidden": 32, "heads": 2, "ffn": 64, "vocab_size": WORDS, "max_seq_len": LENGTH} | options
    return applications.BertBase(**options)


def transformer(**options: Any) -> applications.Transformer:
    options = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 32, "vocab_size": WORDS, "max_seq_len": LENGTH} | options
    return applications.Transformer(**options)


MAKERS = {"resnet": resnet, "vgg": vgg, "bert": bert, "transformer": transformer}


def make(name: str, **options: Any) -> applications.Application:
    torch.manual_seed(0)
    return MAKERS[name](**options)


def batch(name: str, *, seed: int = 1, rows: int = ROWS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def words(*shape: int, low: int = 1) -> Tensor:
        return torch.randint(low, WORDS, shape, generator=g)

    if name in ("resnet", "vgg"):
        side = 32 if name == "resnet" else 16
        image = torch.randn(rows, 3, side, side, generator=g)
        return {"image": image, "label": torch.randint(0, 10, (rows, 1), generator=g)}
    if name == "transformer":
        source, target = words(rows, LENGTH), words(rows, LENGTH - 1)
        return {"src_word": source, "trg_word": target, "lbl_word": target.flip(1)}
    length = torch.randint(6, LENGTH + 1, (rows, 1), generator=g)
    place = torch.arange(LENGTH).expand(rows, LENGTH)
    return {
        "src_ids": words(rows, LENGTH) * (place < length),
        "pos_ids": place.contiguous(),
        "sent_ids": (place >= 3).long(),
        "input_mask": (place < length).float()[:, :, None],
        "mask_label": words(rows, 2),
        "mask_pos": torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(rows)]),  # places in each row
        "labels": torch.randint(0, 2, (rows, 1), generator=g),
    }


def flat(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masked places as Paddle's loaders feed them: one column for the whole batch."""
    places = rows["mask_pos"] + torch.arange(len(rows["mask_pos"]))[:, None] * LENGTH
    column = {"mask_pos": places.reshape(-1, 1), "mask_label": rows["mask_label"].reshape(-1, 1)}
    return rows | column | {key: rows[key][:, :, None] for key in ("src_ids", "pos_ids", "sent_ids")}

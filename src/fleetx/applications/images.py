"""Classifiers of images: ResNet-50 and VGG-16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fleetx.applications.application import Application, Feed, check_dropout, in_form, need_transformers
from fleetx.base.module_names import plain_name
from fleetx.data import Loader, imagenet_train, imagenet_val, load_imagenet_from_file
from fleetx.data.checks import check_choice, check_whole
from fleetx.data.images import LAYOUTS, ImageOptions
from fleetx.errors import UsageError
from fleetx.optim import parameter_names

CHANNELS = 3


class Classified(NamedTuple):
    loss: Tensor
    acc1: Tensor
    acc5: Tensor


class ImageClassifier(Application):
    """Takes images of one size and layout, and their labels; NHWC images are computed in torch's channels_last."""

    outputs = Classified._fields

    def __init__(self, data_layout: str, image_size: int, num_classes: int, unknown: dict[str, Any]):
        super().__init__(unknown)
        check_choice("data_layout", data_layout, LAYOUTS)
        check_whole(image_size=image_size, num_classes=num_classes)
        self.data_layout, self.image_size, self.num_classes = data_layout, image_size, num_classes

    def feeds(self) -> dict[str, Feed]:
        return {"image": Feed((-1, *self._image_shape), torch.float32), "label": Feed((-1, 1))}

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        side = self.image_size
        return (CHANNELS, side, side) if self.data_layout == "NCHW" else (side, side, CHANNELS)

    def logits(self, image: Tensor) -> Tensor:
        """What the network says of images in NCHW."""
        raise NotImplementedError

    def forward(self, image: Tensor, label: Tensor) -> Classified:
        if tuple(image.shape[1:]) != self._image_shape:
            raise UsageError(
                f"image has the shape {tuple(image.shape)}, and {type(self).__name__} with data_layout="
                f"{self.data_layout!r} and image_size={self.image_size} takes {(-1, *self._image_shape)}"
            )
        logits = self.logits(image if self.data_layout == "NCHW" else image.permute(0, 3, 1, 2))
        label = label.reshape(-1)
        with torch.no_grad():
            best = logits.topk(min(5, self.num_classes)).indices
            hits = (best == label[:, None]).float().sum(0) / len(label)
        return Classified(cross_entropy(logits, label), hits[0], hits.sum())

    # --- its data ---------------------------------------------------------------------------------
    def load_imagenet_from_file(
        self,
        filelist: str | Path,
        batch_size: int = 32,
        phase: str = "train",
        shuffle: bool | None = None,
        use_dali: bool = False,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """Images of a list, in the size and layout that this takes; the rest as in `fleetx.data`."""
        return load_imagenet_from_file(filelist, batch_size, phase, shuffle, **self._form(use_dali, options))

    def get_train_dataloader(
        self,
        local_path: str | Path,
        batch_size: int = 32,
        shuffle: bool = True,
        use_dali: bool = False,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """The images of train.txt in a folder."""
        return imagenet_train(local_path, batch_size, shuffle, **self._form(use_dali, options))

    def get_val_dataloader(
        self,
        local_path: str | Path,
        batch_size: int = 32,
        shuffle: bool = False,
        use_dali: bool = False,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """The images of val.txt in a folder; each rank gets its share of them, unless shard=False."""
        return imagenet_val(local_path, batch_size, shuffle, **self._form(use_dali, options))

    def _form(self, use_dali: bool, options: ImageOptions) -> dict[str, Any]:
        """What a loader must know of this model."""
        if use_dali:
            raise UsageError("use_dali=True: images are read by torch's DataLoader: leave it out, and set num_workers")
        form = {"data_layout": self.data_layout, "image_size": self.image_size, "num_classes": self.num_classes}
        return in_form(options, **form)

    def _in_layout(self) -> None:
        """Once the layers are there."""
        if self.data_layout == "NHWC":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _check_stages(layers: Any) -> None:
    if not isinstance(layers, Sequence) or not layers:
        raise UsageError(f"layers = {layers!r}: must be a list of numbers, one for each stage")
    check_whole(**{f"layers[{i}]": n for i, n in enumerate(layers)})


class Resnet50(ImageClassifier):
    """ResNet-50 as `transformers` has it; its weights go by the names of `ResNetForImageClassification`."""

    def __init__(
        self,
        data_layout: str = "NCHW",
        *,
        layers: Sequence[int] = (3, 4, 6, 3),
        hidden: int = 64,
        image_size: int = 224,
        num_classes: int = 1000,
        **unknown: Any,
    ):
        """layers: blocks in each of its stages; hidden: channels of the stem, which the blocks multiply."""
        super().__init__(data_layout, image_size, num_classes, unknown)
        check_whole(hidden=hidden)
        _check_stages(layers)
        need_transformers(self)
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            num_channels=CHANNELS,
            embedding_size=hidden,
            hidden_sizes=[4 * hidden * 2**stage for stage in range(len(layers))],
            depths=list(layers),
        )
        config.num_labels = num_classes
        made = ResNetForImageClassification(config)
        self.resnet, self.classifier = made.resnet, made.classifier
        self._layers = tuple(layers)
        self._in_layout()

    @property
    def checkpoints(self) -> list[str]:
        return [f"resnet.encoder.stages.{stage}.layers.{i}" for stage, n in enumerate(self._layers) for i in range(n)]

    def logits(self, image: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.resnet(image).pooler_output)
        return found

    def paddle_names(self) -> dict[str, list[str]]:
        """Paddle's program makes the shortcut of a block behind its convolutions, transformers before them."""
        blocks, begun = set(self.checkpoints), 0
        placed = []
        for name, module in self.named_modules():
            if (plain := plain_name(name)) in blocks:
                blocks.remove(plain)  # what torch.compile has wrapped goes by the same name
                begun += 1
            placed.append((begun, ".shortcut." in name, name, module))
        return parameter_names.numbered((name, module) for *_, name, module in sorted(placed, key=lambda p: p[:2]))


class VGG16(ImageClassifier):
    """VGG-16; its weights go by torchvision's names."""

    def __init__(
        self,
        data_layout: str = "NCHW",
        *,
        layers: Sequence[int] = (2, 2, 3, 3, 3),
        hidden: int = 64,
        ffn: int = 4096,
        image_size: int = 224,
        num_classes: int = 1000,
        dropout: float = 0.5,
        **unknown: Any,
    ):
        """layers: convolutions before each pooling; hidden: channels of the first; ffn: width of the classifier."""
        super().__init__(data_layout, image_size, num_classes, unknown)
        check_whole(hidden=hidden, ffn=ffn)
        _check_stages(layers)
        check_dropout(dropout)
        if image_size % 2 ** len(layers):
            raise UsageError(
                f"image_size = {image_size}: must be a multiple of {2 ** len(layers)}, as it is halved often"
            )
        self.features = nn.Sequential()
        self._pools: list[int] = []
        channels = CHANNELS
        for stage, convolutions in enumerate(layers):
            for _ in range(convolutions):
                width = hidden * min(2**stage, 8)
                self.features.extend([nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)])
                channels = width
            self._pools.append(len(self.features))
            self.features.append(nn.MaxPool2d(2))
        self.flatten = nn.Flatten()  # a module, so that a pipeline sees what passes
        side = image_size // 2 ** len(layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * side * side, ffn), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(ffn, ffn), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(ffn, num_classes),
        )  # fmt: skip
        self.apply(_start)
        self._in_layout()

    @property
    def checkpoints(self) -> list[str]:
        return [f"features.{i}" for i in self._pools]

    def logits(self, image: Tensor) -> Tensor:
        found: Tensor = self.classifier(self.flatten(self.features(image)))
        return found


def _start(module: nn.Module) -> None:
    """Without normalization, sixteen layers learn only from weights that keep the size of what passes."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)

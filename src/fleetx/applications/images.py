"""Image classifiers: ResNet-50 and VGG-16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fleetx.applications.application import Application, Feed, model_options, whole_by_default
from fleetx.base.module_names import plain_name
from fleetx.comm.notices import say_once
from fleetx.data import Loader, imagenet_train, imagenet_val, load_imagenet_from_file
from fleetx.data.checks import check_choice, check_fraction, check_int, optional
from fleetx.data.images import LAYOUTS, ImageOptions
from fleetx.errors import UsageError
from fleetx.optim import parameter_names

CHANNELS = 3


class ClassificationOutput(NamedTuple):
    loss: Tensor
    acc1: Tensor
    acc5: Tensor


class ImageClassifier(Application):
    """Takes images of a fixed size and layout, and labels. NHWC uses torch's channels_last memory format."""

    outputs = ClassificationOutput._fields
    use_dali: ClassVar[bool] = False  # scripts read it to decide whether to reset the loader

    def __init__(self, data_layout: str, image_size: int, num_classes: int, unknown: dict[str, Any]):
        super().__init__(unknown)
        check_choice("data_layout", data_layout, LAYOUTS)
        check_int(image_size=image_size, num_classes=num_classes)
        self.data_layout, self.image_size, self.num_classes = data_layout, image_size, num_classes

    def feeds(self) -> dict[str, Feed]:
        return {"image": Feed((-1, *self._image_shape), torch.float32), "label": Feed((-1, 1))}

    @property
    def _image_shape(self) -> tuple[int, int, int]:
        side = self.image_size
        return (CHANNELS, side, side) if self.data_layout == "NCHW" else (side, side, CHANNELS)

    def logits(self, image: Tensor) -> Tensor:
        """Class scores for NCHW images."""
        raise NotImplementedError

    def forward(self, image: Tensor, label: Tensor) -> ClassificationOutput:
        if tuple(image.shape[1:]) != self._image_shape:
            raise UsageError(
                f"image has shape {tuple(image.shape)}, but {type(self).__name__} with data_layout="
                f"{self.data_layout!r} and image_size={self.image_size} expects {(-1, *self._image_shape)}"
            )
        logits = self.logits(image if self.data_layout == "NCHW" else image.permute(0, 3, 1, 2))
        label = label.reshape(-1)
        with torch.no_grad():
            best = logits.topk(min(5, self.num_classes)).indices
            hits = (best == label[:, None]).float().sum(0) / len(label)
        return ClassificationOutput(cross_entropy(logits, label), hits[0], hits.sum())

    # --- data -------------------------------------------------------------------------------------
    def load_imagenet_from_file(
        self,
        filelist: str | Path,
        batch_size: int = 32,
        phase: str = "train",
        shuffle: bool | None = None,
        use_dali: bool = False,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """Load the images listed in a file, in this model's size and layout; see `fleetx.data`.

        In the phase "val", every rank reads all images unless shard=True.
        """
        options = whole_by_default(options) if phase == "val" else options
        return load_imagenet_from_file(filelist, batch_size, phase, shuffle, **self._options(use_dali, options))

    def get_train_dataloader(
        self,
        local_path: str | Path,
        batch_size: int = 32,
        shuffle: bool = True,
        use_dali: bool = False,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """Load the images listed in the folder's train.txt."""
        return imagenet_train(local_path, batch_size, shuffle, **self._options(use_dali, options))

    def get_val_dataloader(
        self,
        local_path: str | Path,
        batch_size: int = 32,
        shuffle: bool = False,
        use_dali: bool = False,
        **options: Unpack[ImageOptions],
    ) -> Loader:
        """Load the images listed in the folder's val.txt. Every rank reads all of them unless shard=True."""
        return imagenet_val(local_path, batch_size, shuffle, **self._options(use_dali, whole_by_default(options)))

    def _options(self, use_dali: bool, options: ImageOptions) -> dict[str, Any]:
        if use_dali:
            say_once("use_dali=True has no effect: torch's DataLoader reads the images; speed it up with num_workers")
        return model_options(
            options, data_layout=self.data_layout, image_size=self.image_size, num_classes=self.num_classes
        )

    def _apply_layout(self) -> None:
        """Call this after all layers have been created."""
        if self.data_layout == "NHWC":
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _check_stages(layers: Any) -> None:
    if not isinstance(layers, Sequence) or not layers:
        raise UsageError(f"layers = {layers!r}: must be a list of integers, one per stage")
    check_int(**{f"layers[{i}]": n for i, n in enumerate(layers)})


class Resnet50(ImageClassifier):
    """The ResNet-50 of `transformers`, with the parameter names of `ResNetForImageClassification`."""

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
        """layers: blocks per stage; hidden: channels of the stem; the stages have multiples of it."""
        super().__init__(data_layout, image_size, num_classes, unknown)
        check_int(hidden=hidden)
        _check_stages(layers)
        transformers = optional("transformers", f"{type(self).__name__} needs transformers")
        config = transformers.ResNetConfig(
            num_channels=CHANNELS,
            embedding_size=hidden,
            hidden_sizes=[4 * hidden * 2**stage for stage in range(len(layers))],
            depths=list(layers),
        )
        config.num_labels = num_classes
        model = transformers.ResNetForImageClassification(config)
        self.resnet, self.classifier = model.resnet, model.classifier
        self._layers = tuple(layers)
        self._apply_layout()

    @property
    def checkpoints(self) -> list[str]:
        return [f"resnet.encoder.stages.{stage}.layers.{i}" for stage, n in enumerate(self._layers) for i in range(n)]

    def logits(self, image: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.resnet(image).pooler_output)
        return result

    def paddle_names(self) -> dict[str, list[str]]:
        """Number the shortcut of a block after its convolutions, as Paddle does; transformers creates it first."""
        blocks, block = set(self.checkpoints), 0
        modules = []
        for name, module in self.named_modules():
            if (plain := plain_name(name)) in blocks:
                blocks.remove(plain)  # a module inside torch.compile has the same plain name
                block += 1
            modules.append((block, ".shortcut." in name, name, module))
        return parameter_names.numbered((name, module) for *_, name, module in sorted(modules, key=lambda m: m[:2]))


class VGG16(ImageClassifier):
    """VGG-16, with torchvision's parameter names."""

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
        """layers: convolutions before each pooling; hidden: channels of the first one; ffn: width of the classifier."""
        super().__init__(data_layout, image_size, num_classes, unknown)
        check_int(hidden=hidden, ffn=ffn)
        _check_stages(layers)
        check_fraction(dropout=dropout)
        if image_size % 2 ** len(layers):
            raise UsageError(
                f"image_size = {image_size}: must be a multiple of {2 ** len(layers)}, because every stage halves it"
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
        self.flatten = nn.Flatten()  # a module, so that a pipeline can see its input and output
        side = image_size // 2 ** len(layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * side * side, ffn), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(ffn, ffn), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(ffn, num_classes),
        )  # fmt: skip
        self.apply(_initialize)
        self._apply_layout()

    @property
    def checkpoints(self) -> list[str]:
        return [f"features.{i}" for i in self._pools]

    def logits(self, image: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.flatten(self.features(image)))
        return result


def _initialize(module: nn.Module) -> None:
    """Preserve the scale of activations: otherwise, sixteen layers without normalization do not train."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
        nn.init.zeros_(module.bias)

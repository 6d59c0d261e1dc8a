"""Data loaders. Each yields batches, mostly as dicts of named tensors, and gives every rank its own share.

load_imagenet_from_file, imagenet_train, imagenet_val              image lists in ImageNet's format
load_digital_dataset_from_file, digital_train, digital_val         tokenized BERT data
load_wmt16_dataset_from_file, translation_train, translation_val   parallel text in byte pair encoding
load_idx_from_file, load_fashion_mnist, load_digits                small images held in memory
load_dataset                                                       any map-style dataset of torch: `fleet.loader`

`Loader` documents what they share: options, order, sharding and resuming.
"""

from fleetx.data.arrays import load_digits, load_fashion_mnist, load_idx_from_file
from fleetx.data.bert import digital_train, digital_val, load_digital_dataset_from_file
from fleetx.data.datasets import load_dataset
from fleetx.data.images import imagenet_train, imagenet_val, load_imagenet_from_file
from fleetx.data.loader import Batch, Loader, LoaderOptions
from fleetx.data.translation import load_wmt16_dataset_from_file, translation_train, translation_val
from fleetx.errors import DataError

__all__ = [
    "Batch",
    "DataError",
    "Loader",
    "LoaderOptions",
    "digital_train",
    "digital_val",
    "imagenet_train",
    "imagenet_val",
    "load_dataset",
    "load_digital_dataset_from_file",
    "load_digits",
    "load_fashion_mnist",
    "load_idx_from_file",
    "load_imagenet_from_file",
    "load_wmt16_dataset_from_file",
    "translation_train",
    "translation_val",
]

"""Loaders for the formats of the documents; each gives batches of named tensors, to each rank its own.

load_imagenet_from_file, imagenet_train, imagenet_val              lists of images
load_digital_dataset_from_file, digital_train, digital_val         BERT's digital data
load_idx_from_file, load_fashion_mnist, load_digits                small images in memory

What they have in common is in `Loader`: the options, the order, how ranks share it, going on later.
"""

from __future__ import annotations

from fleetx.data.arrays import load_digits, load_fashion_mnist, load_idx_from_file
from fleetx.data.bert import digital_train, digital_val, load_digital_dataset_from_file
from fleetx.data.images import imagenet_train, imagenet_val, load_imagenet_from_file
from fleetx.data.loader import Batch, Loader, LoaderOptions
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
    "load_digital_dataset_from_file",
    "load_digits",
    "load_fashion_mnist",
    "load_idx_from_file",
    "load_imagenet_from_file",
]

"""The loaders that the documents call on a model: those of fleetx.data, in the form that the model takes."""

from __future__ import annotations

import pytest
import torch
from data_files import digital, images, varied
from small_applications import bert, resnet

from fleetx import UsageError, data


def same(mine, theirs):
    pairs = list(zip(mine(), theirs, strict=True))
    assert pairs
    for ours, others in pairs:
        torch.testing.assert_close(ours, others, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_images_come_in_the_size_and_layout_of_the_model(tmp_path, layout):
    model = resnet(data_layout=layout)
    form = {"image_size": 32, "data_layout": layout}
    train, val = images(tmp_path, 6), images(tmp_path, 4, phase="val")
    same(model.load_imagenet_from_file(train, 3), data.load_imagenet_from_file(train, 3, **form))
    same(model.load_imagenet_from_file(val, 2, "val"), data.load_imagenet_from_file(val, 2, "val", **form))
    same(model.get_train_dataloader(tmp_path, batch_size=3, seed=5), data.imagenet_train(tmp_path, 3, seed=5, **form))
    same(model.get_val_dataloader(tmp_path, 2), data.imagenet_val(tmp_path, 2, **form))
    for batch in model.get_train_dataloader(tmp_path, 3):
        assert model(**batch).loss.isfinite()
    with pytest.raises(UsageError, match="use_dali=True is not supported: images are read by torch's DataLoader"):
        model.get_train_dataloader(tmp_path, use_dali=True)


def test_digital_data_comes_as_fleetx_data_has_it(tmp_path):
    model = bert(vocab_size=200, max_seq_len=32)
    folder, vocabulary = digital(tmp_path, varied(10))
    arguments = {"batch_size": 4, "max_seq_len": 32}
    same(
        model.load_digital_dataset_from_file(folder, vocabulary, **arguments),
        data.load_digital_dataset_from_file(folder, vocabulary, **arguments),
    )
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text("digital/part0\n")
    arguments = {"batch_size": 64, "max_seq_len": 32}
    same(model.get_train_dataloader(tmp_path, **arguments), data.digital_train(tmp_path, **arguments))
    same(model.get_val_dataloader(tmp_path, **arguments), data.digital_val(tmp_path, **arguments))
    for batch in model.get_train_dataloader(tmp_path, **arguments):
        assert model(**batch).loss.isfinite()

"""The loaders of a model reject data that it cannot take, by file and line."""

from __future__ import annotations

import pytest
from data_files import digital, images, line, varied
from small_applications import bert, resnet

from fleetx import UsageError
from fleetx.data import DataError


def loaders(model, folder, lines, **options):
    """A function for each of its loaders."""
    data, vocabulary = digital(folder, lines, files=1)
    for name in ("train", "val"):
        (folder / f"{name}.txt").write_text("digital/part0\n")
    yield lambda: model.get_train_dataloader(folder, 64, **options)
    yield lambda: model.get_val_dataloader(folder, 64, **options)
    yield lambda: model.load_digital_dataset_from_file(data, vocabulary, 64, **options)


def test_words_outside_a_berts_vocabulary_are_reported_by_file_and_line(tmp_path):
    largest = max(map(int, line(3).split(";")[0].split()))
    model = bert(vocab_size=largest, max_seq_len=32)
    for load in loaders(model, tmp_path, [line(3)], generate_neg_sample=False):
        with pytest.raises(DataError, match=rf"part0, line 1: token id {largest} is outside the vocabulary"):
            load()


def test_lines_cannot_be_longer_than_a_berts_max_seq_len(tmp_path):
    model = bert(vocab_size=200, max_seq_len=16)
    for load in loaders(model, tmp_path, varied(6), max_seq_len=17):
        with pytest.raises(UsageError, match="max_seq_len = 17: this model was created with max_seq_len = 16"):
            load()
    for load in loaders(model, tmp_path, varied(6)):
        assert all(model(**batch).loss.isfinite() for batch in load())
    for load in loaders(model, tmp_path, varied(6), vocab_size=100):
        with pytest.raises(UsageError, match="vocab_size = 100: this model was created with vocab_size = 200"):
            load()


def test_labels_outside_the_classes_are_reported_by_file_and_line(tmp_path):
    filelist, model = images(tmp_path, 12), resnet()
    with pytest.raises(DataError, match=r"train.txt, line 11: label 10 is outside the 10 classes"):
        model.get_train_dataloader(tmp_path, 4)
    loader = model.load_imagenet_from_file(filelist, 4, on_error="skip")
    assert all(model(**batch).loss.isfinite() for batch in loader)
    assert loader.skipped == 2


def test_options_that_the_model_determines_cannot_be_contradicted(tmp_path):
    filelist, model = images(tmp_path, 4), resnet()
    assert len(model.load_imagenet_from_file(filelist, 2, data_layout="NCHW", image_size=32)) == 2
    with pytest.raises(UsageError, match="data_layout = 'NHWC': this model was created with data_layout = 'NCHW'"):
        model.load_imagenet_from_file(filelist, 2, data_layout="NHWC")
    with pytest.raises(UsageError, match="has no option 'batchsize': did you mean 'batch_size'"):
        model.load_imagenet_from_file(filelist, batchsize=4)
    with pytest.raises(UsageError, match="has no option 'cachedir': did you mean 'cache_dir'"):
        bert().load_digital_dataset_from_file(*digital(tmp_path, varied(4)), cachedir="x")

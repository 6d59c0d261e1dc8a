"""What a model cannot take, its loaders refuse, with file and line."""

from __future__ import annotations

import pytest
from data_files import digital, images, line, varied
from small_applications import bert, resnet

from fleetx import UsageError
from fleetx.data import DataError


def three(model, folder, lines, **options):
    """Each of its loaders."""
    data, vocabulary = digital(folder, lines, files=1)
    for name in ("train", "val"):
        (folder / f"{name}.txt").write_text("digital/part0\n")
    yield lambda: model.get_train_dataloader(folder, 64, **options)
    yield lambda: model.get_val_dataloader(folder, 64, **options)
    yield lambda: model.load_digital_dataset_from_file(data, vocabulary, 4, **options)


def test_words_that_a_bert_does_not_know_are_named_by_file_and_line(tmp_path):
    largest = max(map(int, line(3).split(";")[0].split()))
    model = bert(vocab_size=largest, max_seq_len=32)
    for load in three(model, tmp_path, [line(3)], generate_neg_sample=False):
        with pytest.raises(DataError, match=rf"part0, line 1: the token id {largest} is beyond the vocabulary"):
            load()


def test_a_bert_takes_no_longer_lines_than_it_was_made_for(tmp_path):
    model = bert(vocab_size=200, max_seq_len=16)
    for load in three(model, tmp_path, varied(6), max_seq_len=17):
        with pytest.raises(UsageError, match="max_seq_len = 17: this model was made with max_seq_len = 16"):
            load()
    for load in three(model, tmp_path, varied(6)):
        assert all(model(**batch).loss.isfinite() for batch in load())
    for load in three(model, tmp_path, varied(6), vocab_size=100):
        with pytest.raises(UsageError, match="vocab_size = 100: this model was made with vocab_size = 200"):
            load()


def test_labels_that_a_classifier_does_not_know_are_named_by_file_and_line(tmp_path):
    filelist, model = images(tmp_path, 12), resnet()
    with pytest.raises(DataError, match=r"train.txt, line 11: the label 10 is beyond the 10 classes"):
        model.get_train_dataloader(tmp_path, 4)
    loader = model.load_imagenet_from_file(filelist, 4, on_error="skip")
    assert all(model(**batch).loss.isfinite() for batch in loader)
    assert loader.skipped == 2


def test_what_the_model_decides_may_be_said_again_and_not_otherwise(tmp_path):
    filelist, model = images(tmp_path, 4), resnet()
    assert len(model.load_imagenet_from_file(filelist, 2, data_layout="NCHW", image_size=32)) == 2
    with pytest.raises(UsageError, match="data_layout = 'NHWC': this model was made with data_layout = 'NCHW'"):
        model.load_imagenet_from_file(filelist, 2, data_layout="NHWC")
    with pytest.raises(UsageError, match="has no option 'batchsize': did you mean 'batch_size'"):
        model.load_imagenet_from_file(filelist, batchsize=4)
    with pytest.raises(UsageError, match="has no option 'cachedir': did you mean 'cache_dir'"):
        bert().load_digital_dataset_from_file(*digital(tmp_path, varied(4)), cachedir="x")

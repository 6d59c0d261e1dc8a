"""An invalid record is reported by file and line, or skipped, counted and logged."""

from __future__ import annotations

import logging

import pytest
from data_files import digital, images, labels, rows, varied
from PIL import Image

from fleetx.data import DataError, load_digital_dataset_from_file, load_imagenet_from_file

SMALL = {"image_size": 8}


def invalid_images(folder):
    filelist = images(folder, 8)
    (folder / "train" / "2.JPEG").write_bytes(b"not an image")
    content = (folder / "train" / "4.JPEG").read_bytes()
    (folder / "train" / "4.JPEG").write_bytes(content[: len(content) // 2])
    (folder / "train" / "6.JPEG").unlink()
    return filelist


@pytest.mark.parametrize("workers", [0, 2])
def test_invalid_images_are_skipped_counted_and_logged_after_the_epoch(tmp_path, caplog, workers):
    loader = load_imagenet_from_file(invalid_images(tmp_path), 4, on_error="skip", num_workers=workers, **SMALL)
    with caplog.at_level(logging.WARNING):
        assert sorted(label for batch in labels(loader) for label in batch) == [0, 1, 3, 5, 7]
    assert loader.skipped == 3
    assert [r.getMessage().split(";")[0] for r in caplog.records] == ["epoch 0: skipped 3 invalid records"]
    list(loader)
    assert loader.skipped == 3


@pytest.mark.parametrize(
    ("workers", "keep", "words"),
    [(0, 2, "cannot decode 2.JPEG"), (2, 4, "Truncated|truncated"), (0, 6, "No such file or directory")],
)
def test_an_invalid_image_is_reported_by_list_line_and_file(tmp_path, workers, keep, words):
    filelist = invalid_images(tmp_path)
    lines = filelist.read_text().splitlines(keepends=True)
    filelist.write_text("".join(x for i, x in enumerate(lines) if i not in {2, 4, 6} - {keep}))
    number = keep + 1 - sum(i < keep for i in (2, 4, 6))
    loader = load_imagenet_from_file(filelist, 4, num_workers=workers, **SMALL)
    with pytest.raises(DataError, match=rf"train.txt, line {number}: .*({words})") as caught:
        list(loader)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_without_a_valid_record_is_replaced_by_the_next_valid_one(tmp_path, caplog, workers):
    options = SMALL | {"shuffle": False, "on_error": "skip", "num_workers": workers}
    filelist = invalid_images(tmp_path)
    (tmp_path / "train" / "7.JPEG").write_bytes(b"not one either")
    loader = load_imagenet_from_file(filelist, 1, **options)
    with caplog.at_level(logging.WARNING):
        assert labels(loader) == [[0], [1], [3], [3], [5], [5], [0], [0]]
    assert loader.skipped == 4
    (message,) = [r.getMessage() for r in caplog.records]
    beginning = "epoch 0: skipped 4 invalid records and replaced 4 batches without a valid one; the first one: "
    assert message.startswith(beginning)
    assert message.endswith("line 3: cannot decode 2.JPEG: cannot identify image file")
    shares = [labels(load_imagenet_from_file(filelist, 1, replica=(r, 2), **options)) for r in range(2)]
    assert shares == [[[0], [3], [5], [0]], [[1], [3], [5], [0]]]


def test_if_every_record_is_invalid_skipping_is_an_error(tmp_path):
    filelist = images(tmp_path, 4)
    for file in (tmp_path / "train").iterdir():
        file.write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"every record is invalid.* One of them: .*train.txt, line \d: cannot decode"):
        list(load_imagenet_from_file(filelist, 2, on_error="skip", **SMALL))


@pytest.mark.parametrize("error", [IndexError("list index"), MemoryError(), ZeroDivisionError("division by zero")])
def test_any_error_of_a_decoder_means_an_invalid_record(tmp_path, monkeypatch, error):
    filelist = images(tmp_path, 3)

    def fail(file):
        raise error

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=r"train.txt, line \d: cannot decode \d.JPEG: .*(list|Memory|division)"):
        list(load_imagenet_from_file(filelist, 3, **SMALL))


def test_a_missing_file_is_named_as_in_the_list(tmp_path):
    filelist = images(tmp_path, 1)
    filelist.write_text("n01/x.JPEG 0\n")
    with pytest.raises(DataError, match=r"line 1: cannot read n01/x.JPEG: No such file or directory\."):
        list(load_imagenet_from_file(filelist, 1, **SMALL))


def test_labels_outside_the_classes_are_invalid(tmp_path):
    filelist = images(tmp_path, 3)
    with pytest.raises(DataError, match=r"train.txt, line 3: label 2 is outside the 2 classes"):
        load_imagenet_from_file(filelist, 3, num_classes=2, **SMALL)
    loader = load_imagenet_from_file(filelist, 3, num_classes=2, on_error="skip", **SMALL)
    assert sorted(labels(loader)[0]) == [0, 1]
    assert loader.skipped == 1


INVALID = [
    ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5", "3 fields instead of 4"),
    ("1 5 6 2 7 2;0 0 0 0 1;0 1 2 3 4 5;1", "lengths"),
    ("1 5 600 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "token id 600 is outside the vocabulary of 200"),
    ("1 5 x 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "expected only numbers"),
    ("1 5  2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "expected only numbers"),
    ("1 5 -6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "negative"),
    ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;7", "label 7 is neither 0 nor 1"),
    ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;0", "generate_neg_sample=False"),
    ("1 5 6 8 7 9;0 0 0 0 1 1;0 1 2 3 4 5;1", r"no \[SEP\]"),
    ("1 2 2;0 0 1;0 1 2;1", "no word can be masked"),
    ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 32;1", "position 32 must be less than max_seq_len = 32"),
    ("1 5 6 2 7 2;0 0 0 0 1 7;0 1 2 3 4 5;1", "sentence 7 is neither 0 nor 1"),
]


@pytest.mark.parametrize(("bad", "words"), INVALID)
def test_an_invalid_line_is_reported_by_file_and_line(tmp_path, bad, words):
    lines = varied(6)
    data, vocabulary = digital(tmp_path, [*lines[:3], bad, *lines[3:]], files=1)
    with pytest.raises(DataError, match=rf"part0, line 4: .*{words}"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32)


@pytest.mark.parametrize("cached", [False, True])
def test_invalid_lines_are_skipped(tmp_path, caplog, cached):
    lines, count = varied(6), len(INVALID)
    data, vocabulary = digital(tmp_path, [*lines[:3], *(bad for bad, _ in INVALID), *lines[3:]], files=1)
    options = {"cache_dir": tmp_path / "cache" if cached else None}
    with pytest.raises(DataError, match="part0, line 4: 3 fields"):  # even if it writes the cache
        load_digital_dataset_from_file(data, vocabulary, 4, 32, **options)
    loader = load_digital_dataset_from_file(data, vocabulary, 4, 32, on_error="skip", **options)
    good, _ = digital(tmp_path, lines, files=1)
    with caplog.at_level(logging.WARNING):
        assert rows(loader) == rows(load_digital_dataset_from_file(good, vocabulary, 4, 32))
    assert loader.skipped == count
    assert [r.getMessage().split(";")[0] for r in caplog.records] == [f"epoch 0: skipped {count} invalid records"]

"""A broken record names its file and line, or is skipped, counted and reported."""

from __future__ import annotations

import logging

import pytest
from data_files import digital, images, labels, rows, varied
from PIL import Image

from fleetx.data import DataError, load_digital_dataset_from_file, load_imagenet_from_file

SMALL = {"image_size": 8}


def broken_images(folder):
    filelist = images(folder, 8)
    (folder / "train" / "2.JPEG").write_bytes(b"this is no image")
    whole = (folder / "train" / "4.JPEG").read_bytes()
    (folder / "train" / "4.JPEG").write_bytes(whole[: len(whole) // 2])
    (folder / "train" / "6.JPEG").unlink()
    return filelist


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_skipped_counted_and_reported_at_the_end_of_the_epoch(tmp_path, caplog, workers):
    loader = load_imagenet_from_file(broken_images(tmp_path), 4, on_error="skip", num_workers=workers, **SMALL)
    with caplog.at_level(logging.WARNING):
        assert sorted(label for batch in labels(loader) for label in batch) == [0, 1, 3, 5, 7]
    assert loader.skipped == 3
    assert [r.getMessage().split(";")[0] for r in caplog.records] == ["epoch 0: 3 broken records were skipped"]
    list(loader)
    assert loader.skipped == 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("keep", "words"), [(2, "2.JPEG cannot be decoded"), (4, "Truncated|truncated"), (6, "No such file or directory")]
)
def test_a_broken_image_names_its_list_line_and_file(tmp_path, workers, keep, words):
    filelist = broken_images(tmp_path)
    lines = filelist.read_text().splitlines(keepends=True)
    filelist.write_text("".join(x for i, x in enumerate(lines) if i not in {2, 4, 6} - {keep}))
    number = keep + 1 - sum(i < keep for i in (2, 4, 6))
    loader = load_imagenet_from_file(filelist, 4, num_workers=workers, **SMALL)
    with pytest.raises(DataError, match=rf"train.txt, line {number}: .*({words})") as caught:
        list(loader)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_of_which_nothing_is_left_is_the_next_sound_record_instead(tmp_path, caplog, workers):
    options = SMALL | {"shuffle": False, "on_error": "skip", "num_workers": workers}
    filelist = broken_images(tmp_path)
    (tmp_path / "train" / "7.JPEG").write_bytes(b"nor is this")
    loader = load_imagenet_from_file(filelist, 1, **options)
    with caplog.at_level(logging.WARNING):
        assert labels(loader) == [[0], [1], [3], [3], [5], [5], [0], [0]]
    assert loader.skipped == 4
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("epoch 0: 4 broken records were skipped; the first: ")
    assert said.endswith("line 3: 2.JPEG cannot be decoded: cannot identify image file; 4 batches of nothing else were "
                         "replaced by a sound record each")  # fmt: skip
    shares = [labels(load_imagenet_from_file(filelist, 1, replica=(r, 2), **options)) for r in range(2)]
    assert shares == [[[0], [3], [5], [0]], [[1], [3], [5], [0]]]


def test_where_nothing_at_all_can_be_read_skipping_ends(tmp_path):
    filelist = images(tmp_path, 4)
    for file in (tmp_path / "train").iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"every record is broken.* One of them: .*train.txt, line \d: \d.JPEG cannot"):
        list(load_imagenet_from_file(filelist, 2, on_error="skip", **SMALL))


@pytest.mark.parametrize("error", [IndexError("list index"), MemoryError(), ZeroDivisionError("division by zero")])
def test_whatever_a_decoder_raises_is_a_broken_record(tmp_path, monkeypatch, error):
    filelist = images(tmp_path, 3)

    def fail(file):
        raise error

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=r"train.txt, line \d: \d.JPEG cannot be decoded: .*(list|Memory|division)"):
        list(load_imagenet_from_file(filelist, 3, **SMALL))


def test_a_missing_file_is_named_as_in_the_list(tmp_path):
    filelist = images(tmp_path, 1)
    filelist.write_text("n01/x.JPEG 0\n")
    with pytest.raises(DataError, match=r"line 1: n01/x.JPEG cannot be read: No such file or directory\."):
        list(load_imagenet_from_file(filelist, 1, **SMALL))


def test_labels_beyond_the_classes_are_broken(tmp_path):
    filelist = images(tmp_path, 3)
    with pytest.raises(DataError, match=r"train.txt, line 3: the label 2 is beyond the 2 classes"):
        load_imagenet_from_file(filelist, 3, num_classes=2, **SMALL)
    loader = load_imagenet_from_file(filelist, 3, num_classes=2, on_error="skip", **SMALL)
    assert sorted(labels(loader)[0]) == [0, 1]
    assert loader.skipped == 1


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5", "3 fields instead of 4"),
        ("1 5 6 2 7 2;0 0 0 0 1;0 1 2 3 4 5;1", "lengths"),
        ("1 5 600 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "token id 600 is beyond the vocabulary of 200"),
        ("1 5 x 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "not all is numbers"),
        ("1 5  2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "not all is numbers"),
        ("1 5 -6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;1", "negative"),
        ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;7", "label 7"),
        ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 5;0", "generate_neg_sample=False"),
        ("1 5 6 8 7 9;0 0 0 0 1 1;0 1 2 3 4 5;1", r"no \[SEP\]"),
        ("1 2 2;0 0 1;0 1 2;1", "no word that could be masked"),
        ("1 5 6 2 7 2;0 0 0 0 1 1;0 1 2 3 4 32;1", "the position 32 is not below max_seq_len = 32"),
        ("1 5 6 2 7 2;0 0 0 0 1 7;0 1 2 3 4 5;1", "the sentence 7 is neither 0 nor 1"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_a_broken_line_names_its_file_and_line_or_is_skipped(tmp_path, caplog, bad, words, cached):
    lines = varied(6)
    data, vocabulary = digital(tmp_path, [*lines[:3], bad, *lines[3:]], files=1)
    options = {"cache_dir": tmp_path / "cache" if cached else None}
    with pytest.raises(DataError, match=rf"part0, line 4: .*{words}"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32, **options)
    loader = load_digital_dataset_from_file(data, vocabulary, 4, 32, on_error="skip", **options)
    good, _ = digital(tmp_path, lines, files=1)
    with caplog.at_level(logging.WARNING):
        assert rows(loader) == rows(load_digital_dataset_from_file(good, vocabulary, 4, 32))
    assert loader.skipped == 1
    assert [r.getMessage().split(";")[0] for r in caplog.records] == ["epoch 0: 1 broken records were skipped"]

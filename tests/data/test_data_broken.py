"""A broken record names its file and line, or is skipped, counted and reported."""

from __future__ import annotations

import logging

import pytest
from data_files import digital, images, labels, rows, varied

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


def test_a_batch_of_which_nothing_is_left_is_an_error_even_then(tmp_path):
    filelist = broken_images(tmp_path)
    loader = load_imagenet_from_file(filelist, 1, on_error="skip", **SMALL)
    with pytest.raises(DataError, match="every record of a batch is broken"):
        list(loader)


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

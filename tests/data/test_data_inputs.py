"""Whatever a data file holds, the outcome is batches within the model's bounds or one of our errors."""

from __future__ import annotations

import gzip
from contextlib import suppress

import pytest
from data_files import VOCABULARY, digital, idx, images, line, varied, write_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx.data import (
    DataError,
    digital_train,
    load_digital_dataset_from_file,
    load_idx_from_file,
    load_imagenet_from_file,
)
from fleetx.errors import FleetxError

ENGLISH = b"1 5 6 2 7 2;1 1 1 1 1 1;0 0 0 0 1 1;1 2;5 6;1.0 0.0;1"
NUMBERS = ["0", "1", "2", "5", "199", "200", "-1", "1.5", "1.0", "9" * 20, "9" * 5000, "1e3", "nan", "inf", "x", "",
           "0x1", "+1", "\u0663", ".5", "1e400", "-0", "00005", "\0", "1\u00a02"]  # fmt: skip
NAMES = ["0.JPEG", "../x", "/etc/passwd", "a\0b", "1.JPEG", "x" * 300, "é", "~", ".", "", "train", "0.JPEG/", "CON",
         "./0.JPEG", "*", "\ufeff0.JPEG", "part", "-rf", "\x1b[2J"]  # fmt: skip
number, noise = st.sampled_from(NUMBERS), st.binary(max_size=30)
separator = st.sampled_from([" ", ";", "\n", "  ", "\t", ";;", "\r\n"])


@st.composite
def damaged(draw, whole):
    """A valid text with a few bytes changed or inserted."""
    text = bytearray(draw(whole))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(text)))
        text[place : place + draw(st.integers(0, 1))] = bytes([draw(st.sampled_from(list(b" ;-.0159eEx\n\t\0\xff")))])
    return bytes(text)


chinese = damaged(st.lists(st.integers(0, 40).map(line), max_size=4).map("\n".join).map(str.encode))
lists = st.lists(st.tuples(st.sampled_from(NAMES), separator, number, separator).map("".join), max_size=5)
random_lines = st.lists(st.tuples(number, separator).map("".join), max_size=24).map("".join).map(str.encode)


def batches(load):
    """All batches of the loader, or none if our error says why."""
    try:
        return list(load())
    except FleetxError:
        return []


@pytest.mark.parametrize("options", [{}, {"lang": "en"}, {"on_error": "skip", "generate_neg_sample": False}], ids=str)
def test_any_lines_give_batches_within_the_vocabulary_or_our_error(tmp_path, examples, options):
    data, vocabulary = digital(tmp_path, [], files=1)

    @settings(max_examples=examples)
    @given(chinese | damaged(st.just(ENGLISH)) | random_lines | noise | noise.map(lambda b: b"\x1f\x8b" + b))
    def holds(text):
        (data / "part0").write_bytes(text)
        for batch in batches(lambda: load_digital_dataset_from_file(data, vocabulary, 4, 32, **options)):
            assert 0 <= int(batch["src_ids"].min()) <= int(batch["src_ids"].max()) < VOCABULARY
            assert 0 <= int(batch["mask_label"].min()) <= int(batch["mask_label"].max()) < VOCABULARY
            assert 0 <= int(batch["mask_pos"].min()) <= int(batch["mask_pos"].max()) < batch["src_ids"].numel()
            assert set(batch["sent_ids"].unique().tolist()) | set(batch["labels"].flatten().tolist()) <= {0, 1}

    holds()


def test_any_image_list_gives_batches_or_our_error(tmp_path, examples):
    filelist = images(tmp_path, 2)

    @settings(max_examples=examples)
    @given(lists.map("".join).map(str.encode) | noise)
    def holds(text):
        filelist.write_bytes(text)
        for batch in batches(lambda: load_imagenet_from_file(filelist, 2, image_size=8)):
            assert int(batch["label"].min()) >= 0

    holds()


def test_any_file_list_or_vocabulary_gives_batches_or_our_error(tmp_path, examples):
    (tmp_path / "part").write_text("\n".join(varied(4)))
    tokens = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "w", "w\t5", "[SEP]\t" + "9" * 20, "[MASK]\t-3", "[SEP]\t²", "",
              "\t", "\ufeff[PAD]", "[SEP]\t" + "9" * 5000, "a\t10000000000"]  # fmt: skip
    words = st.lists(st.sampled_from(tokens), max_size=8).map(["[PAD]", "[CLS]", "[SEP]", "[MASK]"].__add__)

    @settings(max_examples=examples)
    @given(lists.map("".join).map(str.encode) | noise, words.map("\n".join).map(str.encode) | noise)
    def holds(filelist, vocabulary):
        (tmp_path / "train.txt").write_bytes(filelist)
        write_vocabulary(tmp_path)
        batches(lambda: digital_train(tmp_path, 64, 32))
        (tmp_path / "train.txt").write_text("part\n")
        (tmp_path / "vocab.txt").write_bytes(vocabulary)
        batches(lambda: digital_train(tmp_path, 64, 32))

    holds()


def test_any_array_file_gives_batches_or_our_error(tmp_path, examples):
    import numpy as np

    labels = idx(tmp_path / "labels", np.zeros(1))

    @settings(max_examples=examples)
    @given(noise.map(lambda b: b"\0\0\x08" + b) | noise.map(gzip.compress) | noise)
    def holds(content):
        (tmp_path / "images").write_bytes(content)
        with suppress(FleetxError):
            list(load_idx_from_file(tmp_path / "images", labels, 1, mean=0.5, deviation=0.5))

    holds()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"\xfa\n", "train.txt is not UTF-8 text"),
        (b"x" * 300, "does not exist; it is one of 1 files"),
        (b"a\0b", "does not exist; it is one of 1 files"),
        (b"", "has no data files"),
    ],
    ids=["latin-1", "300 bytes", "NUL", "empty"],
)
def test_a_bad_file_list_is_refused(tmp_path, text, sentence):
    write_vocabulary(tmp_path)
    (tmp_path / "train.txt").write_bytes(text)
    with pytest.raises(DataError, match=sentence):
        digital_train(tmp_path, 64, 32)


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("w\t²", "'²' after the tab is not a number"),
        ("w\t" + "9" * 5000, "the id 9{40} is not less than"),
        ("w\t10000000000", "the id 10000000000 is not less than 16777216"),
    ],
    ids=["superscript", "5000 digits", "80 GB"],
)
def test_an_id_that_no_vocabulary_has_is_refused(tmp_path, entry, sentence):
    data, vocabulary = digital(tmp_path, varied(4))
    vocabulary.write_text(f"{vocabulary.read_text()}{entry}\n")
    with pytest.raises(DataError, match=rf"vocab.txt, line 201: {sentence}"):
        load_digital_dataset_from_file(data, vocabulary, 4, 32)


def test_a_label_of_5000_digits_is_refused(tmp_path):
    filelist = images(tmp_path, 1)
    filelist.write_text(f"0.JPEG {'9' * 5000}\n")
    with pytest.raises(DataError, match=r"train.txt, line 1: label 9{40} is outside the \d+ classes"):
        load_imagenet_from_file(filelist, 1, image_size=8)

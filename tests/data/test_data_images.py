"""Image lists, transforms, idx files and digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_files import idx, images, labels
from PIL import Image

from fleetx.data import (
    DataError,
    augment,
    imagenet_train,
    imagenet_val,
    load_digits,
    load_fashion_mnist,
    load_idx_from_file,
    load_imagenet_from_file,
    rng,
)
from fleetx.errors import UsageError


def normalized(image):
    """The formula, in float64."""
    pixels = np.asarray(image, np.float64) / 255
    return ((pixels - augment.MEAN) / augment.STD).transpose(2, 0, 1)


# --- pixels ---------------------------------------------------------------------------------------
def test_a_validation_image_is_the_normalized_centre(tmp_path):
    filelist = images(tmp_path, 3, "val")
    filelist.write_text("\ufeff" + filelist.read_text(), encoding="utf-8")  # the BOM of Windows editors
    (batch,) = load_imagenet_from_file(filelist, 4, "val", image_size=28)
    assert batch["label"].tolist() == [[0], [1], [2]]
    for i in range(3):
        image = Image.open(tmp_path / "val" / f"{i}.JPEG").convert("RGB")  # 48 wide, 40 high: 38 by 32, then 28
        centre = image.resize((38, 32), Image.Resampling.BILINEAR).crop((5, 2, 33, 30))
        assert np.allclose(batch["image"][i].numpy(), normalized(centre), atol=1e-5)


def test_random_crops_have_all_sizes_and_half_of_them_are_flipped():
    draws = rng.uniform(rng.key(0, 0, "crop"), np.arange(4000)[:, None], np.arange(augment.DRAWS))
    boxes = np.array([augment._crop_box(500, 375, d) for d in draws.tolist()])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2] <= 500).all()
    assert (boxes[:, 3] <= 375).all()
    area, ratio = w * h / (500 * 375), w / h
    assert 0.075 < area.min() < 0.09
    assert area.max() > 0.95
    assert 0.74 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.35
    assert {0} <= set(boxes[:, 0])
    assert {500} <= set(boxes[:, 2])
    assert abs((draws[:, -1] < 0.5).mean() - 0.5) < 0.04


def test_a_flipped_crop_is_the_mirror_image():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 30, 3), np.uint8))
    draws = [0.5] * (augment.DRAWS - 1)
    a, b = (np.asarray(augment.random_crop(image, 16, [*draws, last])) for last in (0.4, 0.6))
    assert np.array_equal(a, b[:, ::-1])


@pytest.mark.parametrize("shape", [(1, 400), (400, 1), (1, 1), (3, 5)])
def test_images_of_any_shape_can_be_cropped(shape):
    image = Image.fromarray(np.zeros((*shape, 3), np.uint8))
    for i in range(20):
        draws = rng.uniform(0, np.array([i]), np.arange(augment.DRAWS)).tolist()
        assert augment.random_crop(image, 8, draws).size == (8, 8)
    assert augment.centre_crop(image, 8).size == (8, 8)


def test_grey_and_cmyk_images_become_rgb(tmp_path):
    filelist = images(tmp_path, 2)
    Image.new("L", (20, 20), 100).save(tmp_path / "train" / "0.JPEG", format="JPEG")
    Image.new("CMYK", (20, 20)).save(tmp_path / "train" / "1.JPEG", format="JPEG")
    (batch,) = load_imagenet_from_file(filelist, 2, image_size=8)
    assert batch["image"].shape == (2, 3, 8, 8)


def test_an_image_is_cropped_the_same_in_any_batch_but_differently_in_another_epoch(tmp_path):
    filelist = images(tmp_path, 6)

    def by_label(batches):
        return {int(y): x for b in batches for x, y in zip(b["image"], b["label"], strict=True)}

    small, large = (
        load_imagenet_from_file(filelist, 2, image_size=8),
        load_imagenet_from_file(filelist, 6, image_size=8),
    )
    a, b = by_label(small), by_label(large)
    assert all(torch.equal(a[i], b[i]) for i in range(6))
    again = by_label(small)
    assert not any(torch.equal(a[i], again[i]) for i in range(6))


def test_nhwc_is_nchw_permuted(tmp_path):
    filelist = images(tmp_path, 4)
    (a,), (b,) = (load_imagenet_from_file(filelist, 4, data_layout=x, image_size=8) for x in ("NCHW", "NHWC"))
    assert b["image"].is_contiguous()
    assert torch.equal(a["image"], b["image"].permute(0, 3, 1, 2))


# --- lists ----------------------------------------------------------------------------------------
def test_train_and_val_of_a_folder(tmp_path):
    images(tmp_path, 4), images(tmp_path, 3, "val")
    assert sorted(labels(imagenet_train(tmp_path, 4, image_size=8))[0]) == [0, 1, 2, 3]
    assert labels(imagenet_val(tmp_path, 2, image_size=8)) == [[0, 1], [2]]
    assert labels(load_imagenet_from_file(tmp_path / "val.txt", 3, "val", True, image_size=8, seed=1)) != [[0, 1, 2]]


def test_a_list_that_says_jpeg_also_finds_jpeg_files(tmp_path):
    filelist = images(tmp_path, 3, suffix=".jpeg")
    assert len(labels(load_imagenet_from_file(filelist, 3, image_size=8))[0]) == 3


def test_a_list_without_a_folder_of_its_name_uses_the_folder_of_the_phase(tmp_path):
    filelist = images(tmp_path, 3).rename(tmp_path / "some.txt")
    assert len(labels(load_imagenet_from_file(filelist, 3, image_size=8))[0]) == 3


@pytest.mark.parametrize(
    ("bad", "words"), [("0.JPEG", "1 fields instead of 2"), ("0.JPEG 1 2", "3 fields"), ("0.JPEG cat", "label 'cat'")]
)
def test_an_invalid_line_of_a_list_is_reported_by_file_and_line_or_skipped(tmp_path, bad, words):
    filelist = images(tmp_path, 3)
    filelist.write_text(f"0.JPEG 0\n\n{bad}\n2.JPEG 2\n")
    with pytest.raises(DataError, match=f"train.txt, line 3: .*{words}"):
        load_imagenet_from_file(filelist, 3, image_size=8)
    loader = load_imagenet_from_file(filelist, 3, image_size=8, on_error="skip")
    assert sorted(labels(loader)[0]) == [0, 2]
    assert loader.skipped == 1


def test_missing_and_empty_lists_and_wrong_options_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*nowhere.txt"):
        load_imagenet_from_file(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="no records"):
        load_imagenet_from_file(tmp_path / "empty.txt")
    with pytest.raises(UsageError, match="did you mean 'NHWC'"):
        load_imagenet_from_file(tmp_path / "empty.txt", data_layout="NHCW")


# --- arrays ---------------------------------------------------------------------------------------
def fashion(folder, suffix=""):
    random = np.random.default_rng(0)
    pixels, marks = random.integers(0, 256, (10, 6, 5)), np.arange(10)
    for name in ("train", "t10k"):
        idx(folder / f"{name}-images-idx3-ubyte{suffix}", pixels)
        idx(folder / f"{name}-labels-idx1-ubyte{suffix}", marks)
    return pixels


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_give_normalized_pixels_and_labels(tmp_path, suffix):
    pixels = fashion(tmp_path, suffix)
    (batch,) = load_fashion_mnist(tmp_path, 10, "val")
    assert batch["label"].tolist() == [[i] for i in range(10)]
    assert batch["image"].shape == (10, 1, 6, 5)
    assert np.allclose(batch["image"][:, 0].numpy(), (pixels / 255 - 0.2860) / 0.3530, atol=1e-5)
    assert sorted(labels(load_fashion_mnist(tmp_path, 10))[0]) == list(range(10))


def test_invalid_idx_files_are_reported_by_name(tmp_path):
    fashion(tmp_path)
    file, marks = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    content_before = file.read_bytes()
    for content, words in [
        (content_before[:-5], "has 295 values, but its header says 300"),
        (b"\0\0\x0d" + content_before[3:], "not an idx file of unsigned bytes"),
        (b"\0", "not an idx file"),
        (b"\x1f\x8b123", ""),
    ]:
        file.write_bytes(content)
        with pytest.raises(DataError, match=f"train-images-idx3-ubyte.*{words}"):
            load_fashion_mnist(tmp_path)
    idx(file, np.zeros((9, 6, 5)))
    with pytest.raises(DataError, match=r"has 9 images, but .* has 10 labels"):
        load_fashion_mnist(tmp_path)
    with pytest.raises(DataError, match="axes"):
        load_idx_from_file(marks, marks)
    with pytest.raises(DataError, match=r"has neither train-images-idx3-ubyte nor train-images-idx3-ubyte.gz"):
        load_fashion_mnist(tmp_path / "nowhere")


def test_train_and_val_digits_do_not_overlap():
    from sklearn.datasets import load_digits as sklearn_digits  # two seconds, in every process that collects tests

    train, val = list(load_digits(1500)), list(load_digits(297, "val"))
    assert (len(train), len(val)) == (1, 1)
    found = torch.cat([train[0]["image"], val[0]["image"]])
    want = torch.tensor(sklearn_digits().images, dtype=torch.float32)[:, None] / 16 - 0.5
    assert sorted(map(bytes, found.numpy())) == sorted(map(bytes, want.numpy()))

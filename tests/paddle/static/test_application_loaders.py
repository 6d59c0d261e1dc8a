"""The loaders that the documents call on a model: those of fleetx.data, in the form that the model takes."""

from __future__ import annotations

import pytest
import torch
from data_files import digital, images, varied
from small_applications import bert, resnet
from test_translation import wmt

import fleetx
from fleetx import UsageError, applications, data
from fleetx.comm import notices


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


def test_dali_is_left_out_with_one_notice(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    images(tmp_path, 6)
    model = resnet()
    same(model.get_train_dataloader(tmp_path, 3, use_dali=True), model.get_train_dataloader(tmp_path, 3))
    model.load_imagenet_from_file(tmp_path / "train.txt", 3, use_dali=True)
    assert capsys.readouterr().err.count("use_dali=True has no effect: torch's DataLoader reads the images") == 1
    assert not model.use_dali


def test_digital_data_comes_as_fleetx_data_has_it(tmp_path):
    model = bert(vocab_size=200, max_seq_len=32)
    folder, vocabulary = digital(tmp_path, varied(10))
    arguments = {"batch_size": 4, "max_seq_len": 32, "in_tokens": False}
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


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("BertBase", {"batch_size": 4096, "max_seq_len": 512, "in_tokens": True}),
        ("Bert_base", {"batch_size": 4096, "max_seq_len": 512, "in_tokens": True}),
        ("BertLarge", {"batch_size": 16, "max_seq_len": 128, "in_tokens": False}),
        ("Bert_large", {"batch_size": 16, "max_seq_len": 128, "in_tokens": False}),
    ],
)
def test_each_bert_has_the_default_batches_of_its_own(tmp_path, name, default):
    model = getattr(applications, name)(layers=1, hidden=8, heads=1, vocab_size=200)
    folder, vocabulary = digital(tmp_path, varied(300))
    for load in (model.load_digital_dataset_from_file, model.load_digital_dataset_from_file_v2):
        expected = data.load_digital_dataset_from_file(folder, vocabulary, vocab_size=200, **default)
        same(load(folder, vocabulary), expected)


def test_english_data_needs_no_vocabulary(tmp_path):
    (tmp_path / "part").write_text("1 5 6 2;1 1 1 1;0 0 1 1;1 0;7 0;1.0 0.0;1\n" * 4)
    (tmp_path / "train.txt").write_text("part\n")
    model = bert(lang="en", vocab_size=8, max_seq_len=16)
    (batch,) = model.get_train_dataloader(tmp_path, batch_size=64)
    assert batch["mask_label"].tolist() == [[7]] * 4
    with pytest.raises(data.DataError, match="token id 7 is outside the vocabulary of 7"):
        bert(lang="en", vocab_size=7, max_seq_len=16).get_train_dataloader(tmp_path, batch_size=64)


@pytest.mark.parametrize("name", ["BertHuge", "BertGiant"])
def test_berts_whose_size_was_not_published_take_it(name):
    with pytest.raises(UsageError, match=f"the sizes of FleetX's {name} were not published: pass them"):
        getattr(applications, name)(lang="en")
    model = getattr(applications, name)(layers=2, hidden=8, heads=1)
    assert (len(model.checkpoints), model.vocab_size) == (2, 30522)


def test_validation_data_is_whole_on_every_worker(ranks, tmp_path):
    """Scripts evaluate on worker 0 alone; FleetX divides only training data."""
    images(tmp_path, 6)
    images(tmp_path, 4, phase="val")
    (folder := tmp_path / "text").mkdir()
    digital(folder, varied(10))
    (folder / "val.txt").write_text("digital/part0\n")
    (tmp_path / "wmt").mkdir()
    wmt(tmp_path / "wmt")
    assert ranks.run(shares, str(tmp_path)) == [[4, 4, 2, 3, 10, 20], [4, 4, 2, 3, 10, 20]]


def shares(where):
    fleetx.fleet.init()
    model = resnet()

    def rows(loader, name="label"):
        return sum(len(batch[name]) for batch in loader)

    bert_val = bert(vocab_size=200, max_seq_len=32).get_val_dataloader(f"{where}/text", batch_size=64)
    wmt_val = applications.Transformer(layers=1, hidden=8, heads=1, vocab_size=40, max_seq_len=16)
    found = [
        rows(model.get_val_dataloader(where, 2)),
        rows(model.load_imagenet_from_file(f"{where}/val.txt", 2, "val")),
        rows(model.get_val_dataloader(where, 2, shard=True)),
        rows(model.get_train_dataloader(where, 2)),
    ]
    if fleetx.fleet.worker_index() == 0:
        rows(model.get_val_dataloader(where, 2))  # which waits for nobody
    return [*found, rows(bert_val, "labels"), rows(wmt_val.get_val_dataloader(f"{where}/wmt"), "src_word")]

"""Where a checkpoint may be written: nothing of the user's is deleted, and every rank must see the folder."""

from __future__ import annotations

import os
import socket
from functools import partial

import pytest

from fleetx import CheckpointError, UsageError, fleet
from training import net, sgd


def build():
    fleet.init()
    model = net()
    fleet.distribute(model, sgd(model))


@pytest.fixture
def umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_folder_with_other_files_is_refused_and_stays(tmp_path):
    build()
    results = tmp_path / "results"
    results.mkdir()
    (results / "thesis.txt").write_text("mine")
    with pytest.raises(
        UsageError, match=r"results is a folder with other files \(thesis.txt\), which fleet.save would"
    ):
        fleet.save(results)
    assert (results / "thesis.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["results"]


@pytest.mark.parametrize("others", [["manifest.json"], ["manifest.json", "index.json"], ["manifest.json", "app.js"]])
def test_a_manifest_of_another_program_makes_no_checkpoint(tmp_path, others):
    build()
    (tmp_path / "site").mkdir()
    for name in others:
        (tmp_path / "site" / name).write_text("mine")
    with pytest.raises(UsageError, match="site is a folder with other files"):
        fleet.save(tmp_path / "site")
    assert sorted(os.listdir(tmp_path / "site")) == sorted(others)


def test_a_checkpoint_to_which_the_user_has_added_a_file_is_read_and_stays(tmp_path):
    build()
    fleet.save(tmp_path / "c", step=1)
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"other files \(notes.txt\)"):
        fleet.save(tmp_path / "c", step=2)
    assert fleet.load(tmp_path / "c")["step"] == 1


loop = partial(fleet.checkpoints, every=1)


@pytest.mark.parametrize("name", ["a\0b", None, 3, b"bytes"], ids=repr)
@pytest.mark.parametrize("call", [fleet.save, fleet.load, fleet.latest, fleet.export, loop])
def test_what_is_no_path_is_refused(name, call):
    build()
    with pytest.raises(UsageError, match="must be the path of a folder"):
        call(name)


@pytest.mark.parametrize("call", [fleet.save, fleet.export, loop])
def test_a_place_where_nothing_can_be_written_is_named(call):
    build()
    with pytest.raises(CheckpointError, match=r"/sys/\.?fleetx.*not permitted"):
        call("/sys/fleetx")  # not even by root


def test_a_file_or_a_link_is_refused_and_stays(tmp_path):
    build()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match=r"file is a file, which fleet.save would delete: choose a new name"):
        fleet.save(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="link is a symbolic link"):
        fleet.save(tmp_path / "link")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", [".", "..", "/"])
def test_a_place_without_a_name_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build()
    with pytest.raises(UsageError, match="add a name for it"):
        fleet.save(name)


def test_an_empty_folder_and_a_checkpoint_that_lost_files_are_replaced(tmp_path):
    build()
    (tmp_path / "c").mkdir()
    fleet.save(tmp_path / "c", step=1)
    (tmp_path / "c" / "manifest.json").unlink()
    fleet.save(tmp_path / "c", step=2)
    fleet.save(tmp_path / "c", step=3)
    assert fleet.load(tmp_path / "c")["step"] == 3


def test_what_was_saved_without_a_umask_can_be_loaded(tmp_path, umask):
    build()
    fleet.save(tmp_path / "c", step=3)
    assert fleet.load(tmp_path / "c")["step"] == 3


def saved_apart(root, call):
    """Each rank has a folder of its own, as on nodes that share none."""
    build()
    try:
        call(root / f"node-{fleet.worker_index()}" / "c")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("call", [fleet.save, fleet.export], ids=["save", "export"])
def test_a_folder_that_the_ranks_do_not_share_is_named(ranks, tmp_path, call):
    for said in ranks.run(saved_apart, tmp_path, call):
        assert f"rank 1 on {socket.gethostname()} does not see the folder that rank 0 made: use a folder that" in said
    assert os.listdir(tmp_path / "node-0") == []

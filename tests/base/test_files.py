"""Folders that appear whole or not at all."""

from __future__ import annotations

import pytest

from fleetx.base.files import atomic_folder


def fill(folder, text):
    with atomic_folder(folder) as temporary:
        (temporary / "a").write_text(text)
        assert temporary.parent == folder.parent
        if text == "broken":
            raise KeyboardInterrupt


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path):
    for text in ("one", "two"):
        fill(tmp_path / "folder", text)
        assert (tmp_path / "folder" / "a").read_text() == text
        assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_an_interrupted_folder_leaves_the_old_one(tmp_path):
    fill(tmp_path / "folder", "one")
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "folder", "broken")
    assert (tmp_path / "folder" / "a").read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]

"""Tars from strangers: nothing outside of the folder is touched, nothing half is left."""

from __future__ import annotations

import io
import os
import shutil
import signal
import tarfile
import threading

import pytest
from file_server import hardlink, special, symlink, tar

from fleetx.errors import DownloadError
from fleetx.paddle.download import unpack

FILE = b"content"


def deep(info):
    info.type = tarfile.DIRTYPE


EVIL = {
    "a name with two dots": ({"../x": FILE}, "leaves the folder"),
    "dots in the middle": ({"a/../../x": FILE}, "leaves the folder"),
    "an absolute name": ({"/tmp/fleetx-evil": FILE}, "leaves the folder"),
    "an absolute link": ({"l": symlink("/etc")}, "is a link: the name '/etc' leaves the folder"),
    "a link upwards": ({"l": symlink("../x")}, "is a link: .* leaves the folder"),
    "a link too far upwards": ({"a/l": symlink("../../x")}, "is a link: .* leaves the folder"),
    "dots after a name": ({"a/b/l": symlink("../c/../../../x")}, "'..' is allowed only at its start"),
    "dots behind another link": (
        [("a/b/c/up", symlink("../../..")), ("m", symlink("a/b/c/up/../x"))],
        "only at its start",
    ),
    "a link that a later one redirects": (
        [("m", symlink("later/../secret")), ("later", symlink("."))],
        "only at its start",
    ),
    "a file behind a link": ([("l", symlink("a")), ("l/x", FILE)], "is behind a link"),
    "a file over a link": ([("l", symlink("a")), ("l", FILE)], "appears twice in the tar"),
    "a hard link upwards": ({"h": hardlink("../secret")}, "leaves the folder"),
    "an absolute hard link": ({"h": hardlink("/etc/passwd")}, "leaves the folder"),
    "a hard link to nothing": ({"h": hardlink("nothing")}, "which is not an earlier file of the tar"),
    "a hard link to a link": ([("l", symlink("a")), ("h", hardlink("l"))], "which is not an earlier file of the tar"),
    "a character device": ({"d": special(tarfile.CHRTYPE)}, "is a special file"),
    "a block device": ({"d": special(tarfile.BLKTYPE)}, "is a special file"),
    "a pipe": ({"p": special(tarfile.FIFOTYPE)}, "is a special file"),
    "fleetx's own records": ({".fleetx-download/unpacked/b.tar.json": FILE}, "where fleetx keeps its own records"),
    "a link to fleetx's records": ({"l": symlink(".fleetx-download")}, "where fleetx keeps its own records"),
    "records behind a folder": ({"a/.fleetx-download/lock": FILE}, "where fleetx keeps its own records"),
}


@pytest.fixture(params=["filters", "none"])
def tarfile_with(request, monkeypatch):
    """Python 3.11.3 and older have no filters."""
    if request.param == "none":
        trusting = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
        monkeypatch.setattr(unpack, "_FILTER", trusting)


@pytest.mark.usefixtures("tarfile_with")
@pytest.mark.parametrize("case", EVIL)
def test_an_evil_tar_is_refused_whole(server, bring, tmp_path, case):
    members, sentence = EVIL[case]
    members = list(members.items()) if isinstance(members, dict) else members
    with pytest.raises(DownloadError, match=rf"set/evil.tar: .*{sentence}"):
        bring(server.publish({"evil.tar": tar([("fine.txt", FILE), *members])}))
    left = {p.relative_to(tmp_path / "data").as_posix() for p in (tmp_path / "data").rglob("*") if p.is_file()}
    records = {name for name in left if name.startswith(".fleetx-download/")}
    assert left - records == {"filelist.txt", "meta.txt", "train.txt", "evil.tar"}
    assert not [name for name in records if "unpack" in name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "set.yaml"]


def test_links_that_stay_inside_are_unpacked(server, bring):
    members = [
        ("a/x.txt", FILE),
        ("a/near", symlink("x.txt")),
        ("b/far", symlink("../a/x.txt")),
        ("hard", hardlink("a/x.txt")),
        ("empty", deep),
        ("./dotted.txt", FILE),
    ]
    where = bring(server.publish({"a.tar": tar(members)}))
    assert [(where / n).read_bytes() for n in ("a/near", "b/far", "hard", "dotted.txt")] == [FILE] * 4
    assert os.readlink(where / "b/far") == "../a/x.txt"
    assert (where / "empty").is_dir()


def test_a_link_of_one_tar_does_not_carry_a_link_of_another_outside(server, bring, tmp_path):
    bring(server.publish({"one.tar": tar([("a/b/x", FILE), ("up", symlink("a/b"))])}))
    with pytest.raises(DownloadError, match=r"two.tar: the link 'up/l' is behind a link of another tar"):
        bring(server.publish({"two.tar": tar([("up/l", symlink("../x"))])}))
    assert not os.path.lexists(tmp_path / "data/a/b/l")


def test_two_tars_may_not_disagree_about_a_name(server, bring):
    same = {"one.tar": tar({"x": FILE, "1": b"1"}), "two.tar": tar({"x": FILE, "2": b"2"})}
    where = bring(server.publish(same))
    assert (where / "x").read_bytes() == FILE
    with pytest.raises(DownloadError, match=r"\w+.tar and \w+.tar hold different files with the same name, 'x'"):
        bring(server.publish({**same, "two.tar": tar({"x": b"something else"})}))


@pytest.mark.parametrize("name", ["train.txt", "filelist.txt", "evil.tar"])
def test_a_tar_may_not_replace_what_the_lists_brought(server, bring, name):
    with pytest.raises(DownloadError, match=f"hold different files with the same name, '{name}'"):
        bring(server.publish({"evil.tar": tar({name: b"something else"})}))


def test_the_later_of_two_members_of_one_name_counts(server, bring):
    where = bring(server.publish({"a.tar": tar([("x", b"first"), ("x", b"second")])}))
    assert (where / "x").read_bytes() == b"second"


@pytest.mark.parametrize("data", [b"no tar at all", tar({"x": bytes(5000)})[:2000]], ids=["not a tar", "a broken tar"])
def test_a_tar_that_cannot_be_read_is_refused_by_name(server, bring, tmp_path, data):
    with pytest.raises(DownloadError, match=r"set/a.tar: cannot be unpacked: ReadError"):
        bring(server.publish({"a.tar": data}))
    assert not (tmp_path / "data/x").exists()


def test_a_member_that_the_disk_cannot_hold_is_refused(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    (tmp_path / "a.tar").write_bytes(tar({"x": bytes(101)}))
    with pytest.raises(DownloadError, match=r"'x' needs 101 B, but .* has 100 B of disk space left"):
        unpack.unpack(tmp_path / "a.tar", tmp_path / "beside", display="a.tar", stop=threading.Event())


def test_an_interrupted_unpacking_is_done_again(server, bring, monkeypatch, tmp_path):
    """Interrupted in the middle of the renaming, where both old and new files are in place."""
    address = server.publish({"a.tar": tar({f"{i}.txt": FILE for i in range(9)})})
    renamed = []

    def publish(temporary, members, folder, **words):
        for name in list(members)[:4]:
            (temporary / name).replace(folder / name)
            renamed.append(name)
        raise OSError("the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr("fleetx.paddle.download.folder.publish", publish)
        with pytest.raises(DownloadError, match="the power is gone"):
            bring(address)
    assert len(renamed) == 4
    server.asked.clear()
    where = bring(address)
    assert sorted(p.name for p in where.glob("[0-9].txt")) == [f"{i}.txt" for i in range(9)]
    assert server.got("set/a.tar") == []
    assert not list((tmp_path / "data/.fleetx-download/unpacking").iterdir())


@pytest.mark.usefixtures("tarfile_with")
def test_owners_and_set_id_bits_of_a_tar_are_not_taken_over(server, bring):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        info = tarfile.TarInfo("run.sh")
        info.mode, info.size, info.uid, info.gid = 0o6777, 4, 12345, 12345
        archive.addfile(info, io.BytesIO(b"true"))
    where = bring(server.publish({"a.tar": out.getvalue()}))
    found = (where / "run.sh").stat()
    assert found.st_mode & 0o7777 == 0o755
    assert (found.st_uid, found.st_gid) == (os.geteuid(), os.getegid())


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2"])
def test_a_stream_that_breaks_in_the_middle_of_a_member_is_refused_by_name(server, bring, mode):
    """Its md5 is right: this is how it was published."""
    suffix = mode.partition(":")[2]
    data = bytearray(tar({"x": os.urandom(1 << 20)}, mode=mode))
    data[1 << 19 : (1 << 19) + 4000] = os.urandom(4000)
    with pytest.raises(DownloadError, match=rf"set/a\.tar\.{suffix}: cannot be unpacked: "):
        bring(server.publish({f"a.tar.{suffix}": bytes(data)}))


def test_a_thread_that_an_interruption_left_behind_harms_no_later_run(server, bring, monkeypatch):
    extract, asleep, wake, left = tarfile.TarFile.extract, threading.Event(), threading.Event(), []

    def slow(*words, **options):
        extract(*words, **options)
        if not asleep.is_set():  # a member of many GB
            left.append(threading.current_thread())
            asleep.set()
            wake.wait(20)

    def interrupt():
        asleep.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tarfile.TarFile, "extract", slow)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs that a shell starts with `&`
    monkeypatch.setattr("fleetx.paddle.download.folder._GRACE", 0.1)
    address = server.publish({"a.tar": tar({"x": FILE, "y": FILE})})
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        bring(address)

    def meanwhile(*words, **options):
        extract(*words, **options)
        wake.set()
        left[0].join(20)

    monkeypatch.setattr(tarfile.TarFile, "extract", meanwhile)
    where = bring(address)
    assert [(where / name).read_bytes() for name in "xy"] == [FILE, FILE]
    assert not left[0].is_alive()

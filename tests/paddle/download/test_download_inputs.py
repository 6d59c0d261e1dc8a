"""Lists, addresses and answers from strangers: a result or one DownloadError, and no file outside the folder."""

from __future__ import annotations

import shutil
import tarfile
from contextlib import suppress

import pytest
from file_server import filelist, md5, tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fleetx.utils
from fleetx.errors import DownloadError, FleetxError, UsageError
from fleetx.paddle.download import config, listing, remote
from fleetx.paddle.download.downloader import Downloader

SUMS = ["0" * 32, "A" * 32, "0" * 31, "0" * 33, "null", "", "~", "\u0663" * 32]
NAMES = ["a", "A", "../x", "/etc/x", "a/../../x", "a/b", "-rf", "CON", "x" * 300, "a\0b", "\x1b[2J", "e\u0301", "é", "",
         ".", "./a", ".fleetx-download/lock", "~", "a b", "\ufeffa", "filelist.txt", "a.tar"]  # fmt: skip
BITS = ["bos_path", "fs.default.name", "data_path", "hadoop.job.ugi", ": ", "\n", "http://", "file://", "hdfs://", "~",
        "webhdfs://", "swebhdfs://", "memory://", "nosuch://", "@", "[::1", "/a", '"', "::", "1", "u:pw@h", "no",
        "simplecache::", "zip://", "\t", "&a", "*a", "!!python/name:os.system"]  # fmt: skip


def visible(folder):
    """Every file but fleetx's own records."""
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    return {name for name in names if not name.startswith(".fleetx-download/")}


def test_any_list_is_downloaded_or_refused_with_nothing_outside(tmp_path, bring, examples):
    remote_folder = tmp_path / "remote"
    lines = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(SUMS)).map(" ".join), max_size=4).map("\n".join)
    files = ["a", "A", "-rf", "CON", "a b", "é", "~"]

    @settings(max_examples=min(examples, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(lines, st.lists(st.sampled_from(NAMES), max_size=4).map("\n".join), st.sampled_from(["\n", "\r\n"]))
    def holds(sums, meta, end):
        shutil.rmtree(remote_folder, ignore_errors=True)
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        remote_folder.mkdir()
        for name in files:
            (remote_folder / name).write_bytes(name.encode())
        listed = filelist({name: name.encode() for name in files if name in sums.split(" ")}).decode()
        (remote_folder / "filelist.txt").write_text(sums.replace("\n", end) + end + listed)
        (remote_folder / "meta.txt").write_text(meta.replace("\n", end))
        with suppress(FleetxError):
            bring(f"file://{remote_folder}", process_num=1)
        assert {p.name for p in tmp_path.iterdir()} <= {"remote", "data", "set.yaml"}
        assert visible(tmp_path / "data") <= {*files, "filelist.txt", "meta.txt"}

    holds()


def test_any_yaml_gives_an_address_or_our_error(tmp_path, monkeypatch, examples):
    path = tmp_path / "x.yaml"
    monkeypatch.delenv("CLASSPATH", raising=False)
    words = st.lists(st.sampled_from(BITS), min_size=1, max_size=6).map("".join)
    hadoop = words.map("data_path: /x\nfs.default.name: ".__add__)

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given((words | words.map("bos_path: ".__add__) | hadoop).map(str.encode) | st.binary(max_size=20))
    def holds(text):
        path.write_bytes(text)
        for keys, address in ((config.BOS_KEYS, config.bos), (config.HDFS_KEYS, config.hdfs)):
            with suppress(FleetxError):
                remote.connect(address(config.read(path, keys, shown="x.yaml"), shown="x.yaml"), timeout=1)

    holds()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"bos_path: no\n", "bos_path must be a non-empty string, not a bool"),
        (b"bos_path: 12345678901234567890123456789012\n", "must be a non-empty string, not a int"),
        (b"bos_path: null\n", "must be a non-empty string, not a NoneType"),
        (b"bos_path:\thttp://x\n\tx: 1\n", "found character"),
        (b"bos_path: h\xe9\n", "byte 12 is not UTF-8"),
        (b"\xef\xbb\xbfbos_paht: x\n", "unknown key 'bos_paht'"),
        (b"bos_path: http://169.254.169.254/latest\n", "leads to the link-local address 169.254.169.254"),
        (b"bos_path: 'http://[fe80::1]/x'\n", "leads to the link-local address fe80::1"),
        (b"bos_path: ftp://127.0.0.1:9/x\n", "fsspec cannot open this address"),
    ],
    ids=lambda v: str(v)[:40],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fsspec's half-made FTP object
def test_a_bad_yaml_is_refused(tmp_path, text, sentence):
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(DownloadError, match=sentence):
        Downloader().download_from_bos(tmp_path / "x.yaml", str(tmp_path / "data"))
    assert not visible(tmp_path / "data")


def test_a_yaml_of_100_mb_is_refused(tmp_path):
    with (tmp_path / "x.yaml").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(DownloadError, match="is longer than 256 KiB"):
        Downloader().download_from_bos(tmp_path / "x.yaml", str(tmp_path / "data"))


@pytest.mark.parametrize("listed", ["link/x.bin", "link/a.tar"])
def test_a_link_in_the_folder_does_not_lead_a_file_out(server, bring, tmp_path, listed):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(outside)
    with pytest.raises(DownloadError, match=r"data/link/.*: a link in .*data leads out of it"):
        bring(server.publish({listed: tar({"x": b"x"})}))
    assert not list(outside.iterdir())


def test_a_link_in_the_folder_does_not_lead_a_member_out(server, bring, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(outside)
    with pytest.raises(DownloadError, match=r"a.tar: the member 'link/x' is behind a link in .* that leads out of it"):
        bring(server.publish({"a.tar": tar({"link/x": b"x"})}))
    assert not list(outside.iterdir())


@pytest.mark.parametrize("names", [("A.bin", "a.bin"), ("\u00e9.bin", "e\u0301.bin")], ids=ascii)
def test_names_that_many_file_systems_hold_to_be_one_are_refused(server, bring, names):
    with pytest.raises(DownloadError, match="differ only in case or Unicode form"):
        bring(server.publish(dict.fromkeys(names, b"x")))
    with pytest.raises(DownloadError, match="differ only in case or Unicode form"):
        bring(server.publish({names[0]: b"x"}, meta={names[1]: b"x"}))


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[2Jb", "a\tb", "a\x7fb"], ids=ascii)
def test_names_with_control_characters_are_refused_and_shown_without_them(server, bring, name):
    with pytest.raises(DownloadError, match=r"line 1: the name 'a\\.*b' has control characters") as error:
        bring(server.publish({name: b"x"}))
    assert name not in str(error.value)


def test_a_newline_in_a_member_is_refused(server, bring):
    with pytest.raises(DownloadError, match=r"a.tar: the name 'a\\nb' has control characters"):
        bring(server.publish({"a.tar": tar({"a\nb": b"x"})}))


def test_odd_names_that_are_fine_here_are_downloaded(server, bring):
    files = {"-rf": b"1", "CON": b"2", "two words": b"3", "$(true)": b"4", "é": b"5", "%2e%2e": b"6"}
    where = bring(server.publish(files))
    assert {name: (where / name).read_bytes() for name in files} == files


def test_a_name_longer_than_the_disk_allows_fails_by_name(server, bring):
    with pytest.raises(DownloadError, match="File name too long"):
        bring(server.publish({"x" * 300: b"x"}))


def test_a_file_that_must_also_be_a_folder_fails_by_name(server, bring):
    with pytest.raises(DownloadError, match=r"data/a|set/a"):
        bring(server.publish({"a": b"x", "a/b": b"y"}), process_num=1)


@pytest.mark.parametrize("md5_text", ["null", "~", "", "0" * 31, "0" * 33, "g" * 32], ids=repr)
def test_what_is_no_md5_is_refused_by_line(md5_text):
    with pytest.raises(DownloadError, match=r"x, line 1: .* must be a name and its md5"):
        listing.read_filelist(f"a.bin {md5_text}\n", "x")


@pytest.mark.parametrize("md5_text", ["1" * 32, "ABCDEF" + "0" * 26], ids=["digits", "upper case"])
def test_any_spelling_of_an_md5_is_read(md5_text):
    assert listing.read_filelist(f"a.bin {md5_text}\n", "x") == [listing.ListedFile("a.bin", md5_text.lower())]


def test_a_file_without_an_end_stops_before_the_disk_is_full(server, bring, monkeypatch, tmp_path):
    """The server states no length; the disk has 65 MiB left, of which 64 are kept."""
    address = server.publish({"a.bin": bytes(3 << 20)})
    server.lengths = server.heads = False
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=(67 << 20) - written(tmp_path)))
    with pytest.raises(DownloadError, match=r"a.bin has no stated length, and after \d+ bytes needs"):
        bring(address)
    assert not (tmp_path / "data/a.bin").exists()


def written(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def test_ranges_that_are_never_satisfiable_end(server, bring, tmp_path):
    data = b"x" * 1000
    part = tmp_path / "data/.fleetx-download/parts/a.bin" / md5(data)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"y" * 500)
    address = server.publish({"a.bin": data})
    server.faults["/set/a.bin"] = [("status", 416)] * 20
    with pytest.raises(DownloadError, match=r"set/a.bin: "):
        bring(address)


def test_a_member_that_says_it_has_a_petabyte_is_refused(server, bring):
    huge = tarfile.TarInfo("x")
    huge.size = 1 << 50
    with pytest.raises(DownloadError, match=r"a.tar: 'x' needs 1,?024.* TiB|a.tar: 'x' needs .*, but"):
        bring(server.publish({"a.tar": huge.tobuf() + bytes(1024)}))


def test_a_zip_is_data_and_is_not_unpacked(server, bring):
    where = bring(server.publish({"a.zip": b"PK\x03\x04 whatever it holds"}))
    assert sorted(p.name for p in where.iterdir() if p.is_file()) == ["a.zip", "filelist.txt", "meta.txt", "train.txt"]


@pytest.mark.parametrize(
    "download",
    [
        lambda: fleetx.utils.Downloader().download_from_bos(None),
        lambda: fleetx.utils.Downloader().download_from_hdfs(None),
        lambda: fleetx.utils.ImageNetDownloader().download_from_hdfs(),
    ],
)
def test_a_script_that_was_not_told_where_the_data_is_says_how(download):
    with pytest.raises(UsageError, match=r"fs_yaml=None: must be the yaml file .* --download_config FILE"):
        download()

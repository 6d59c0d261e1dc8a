"""The old layout, from every kind of address: yaml, filelist.txt, meta.txt, tars, shards."""

from __future__ import annotations

import base64
import gc
import importlib.util
import os
import subprocess
import sys

import fsspec
import pytest
from file_server import MEGABYTE, filelist, md5, tar

import fleetx.utils
from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download import config, folder, node, progress
from fleetx.paddle.download.downloader import Downloader

TARS = {f"part-{i}.tar": tar({f"train/{i}.txt": b"x" * (100 + i)}) for i in range(5)}


def visible(where):
    return sorted(p.relative_to(where).as_posix() for p in where.rglob("*") if p.is_file() and ".fleetx" not in str(p))


def test_the_documents_call_brings_the_folder_and_returns_its_path(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server.files["/conf/small.yaml"] = f"bos_path: {server.publish(TARS)}".encode()
    path = fleetx.utils.Downloader().download_from_bos(fs_yaml=f"{server.url}/conf/small.yaml", local_path="./data")
    assert path == "./data"
    unpacked = [f"train/{i}.txt" for i in range(5)]
    assert visible(tmp_path / "data") == sorted([*TARS, *unpacked, "filelist.txt", "meta.txt", "train.txt"])
    assert all((tmp_path / "data" / name).read_bytes() == data for name, data in TARS.items())
    assert (tmp_path / "data/train/3.txt").read_bytes() == b"x" * 103
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_what_is_there_with_the_right_sum_is_not_asked_for_again(server, bring):
    address = server.publish(TARS)
    bring(address)
    server.asked.clear()
    bring(address)
    assert [a.path for a in server.asked] == ["/set/filelist.txt", "/set/meta.txt", "/set/train.txt"]


@pytest.mark.parametrize("harm", ["change the tar", "shorten the tar"])
def test_a_tar_that_was_changed_here_is_brought_again(server, bring, harm):
    where = bring(server.publish(TARS))
    path = where / "part-1.tar"
    path.write_bytes(b"?" * len(TARS["part-1.tar"]) if harm == "change the tar" else TARS["part-1.tar"][:-1])
    server.asked.clear()
    bring(f"{server.url}/set")
    assert path.read_bytes() == TARS["part-1.tar"]
    assert server.got("set/part-1.tar") == [None]
    assert server.got("set/part-2.tar") == []


def test_an_unpacked_file_that_was_lost_is_unpacked_again_without_the_network(server, bring):
    where = bring(server.publish(TARS))
    (where / "train/1.txt").unlink()
    (where / "train/2.txt").write_bytes(b"short")
    server.asked.clear()
    bring(f"{server.url}/set")
    assert [(where / f"train/{i}.txt").stat().st_size for i in (1, 2)] == [101, 102]
    assert not [a for a in server.asked if a.path.endswith(".tar")]


def test_a_tar_removed_after_its_unpacking_is_not_brought_again(server, bring):
    where = bring(server.publish(TARS))
    (where / "part-1.tar").unlink()
    server.asked.clear()
    bring(f"{server.url}/set")
    assert server.got("set/part-1.tar") == []


def test_a_new_version_replaces_the_old_one(server, bring):
    bring(server.publish({"a.tar": tar({"x.txt": b"old"})}))
    where = bring(server.publish({"a.tar": tar({"x.txt": b"newer"})}, meta={"train.txt": b"2"}))
    assert (where / "x.txt").read_bytes() == b"newer"
    assert (where / "train.txt").read_bytes() == b"2"


def test_shards_share_the_list_out_and_all_get_the_meta_files(server, tmp_path, bring):
    address = server.publish(TARS)
    where = bring(address, shard_num=2, shard_id=1)
    assert visible(where) == sorted(
        ["filelist.txt", "meta.txt", "train.txt", "part-1.tar", "part-3.tar", "train/1.txt", "train/3.txt"]
    )
    bring(address, shard_num=2, shard_id=0)
    assert set(TARS) <= set(visible(where))
    assert len([a for a in server.asked if a.method == "GET" and a.path.endswith(".tar")]) == 5


def test_a_shard_without_a_file_is_refused(server, bring):
    with pytest.raises(
        DownloadError, match=r"shard_id=5 of shard_num=6 would get no file, because filelist.txt lists 5"
    ):
        bring(server.publish(TARS), shard_num=6, shard_id=5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"shard_num": 2, "shard_id": 2}, "shard_id=2: must be from 0 to 1"),
        ({"shard_num": 2}, "shard_id=-1: must be from 0 to 1"),
        ({"shard_id": 1}, "shard_id=1: has no effect without shard_num"),
        ({"shard_num": 0, "shard_id": 0}, "shard_num=0: must be at least 1, or -1"),
        ({"process_num": 0}, "process_num=0: must be at least 1"),
        ({"process_num": 2.0}, "process_num=2.0: must be an integer"),
        ({"shard_num": True}, "shard_num=True: must be an integer"),
    ],
)
def test_arguments_out_of_bounds_are_refused_before_anything_happens(bring, tmp_path, words, sentence):
    with pytest.raises(UsageError, match=sentence):
        bring("http://127.0.0.1:9", **words)
    assert not (tmp_path / "data").exists()


def test_other_files_than_tars_are_brought_as_they_are_and_compressed_tars_are_unpacked(server, bring):
    files = {"sub/part-0.gz": b"not unpacked", "b.tar.gz": tar({"in/b": b"b"}, mode="w:gz"), "two words.bin": b"3"}
    where = bring(server.publish(files))
    assert (where / "sub/part-0.gz").read_bytes() == b"not unpacked"
    assert (where / "in/b").read_bytes() == b"b"
    assert (where / "two words.bin").read_bytes() == b"3"


# --- the yaml -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bos_paht: http://x\n", "unknown key 'bos_paht': did you mean 'bos_path'?"),
        ("", "bos_path is missing"),
        ("bos_path: [1]\n", "bos_path must be a non-empty string, not a list"),
        ("bos_path: a\nbos_path: b\n", "given more than once"),
        ("bos_path: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
        ("- 1\n", "must be a mapping"),
        ("bos_path: nosuch://x/y\n", "fsspec cannot open this address"),
    ],
)
def test_a_yaml_that_is_wrong_says_so(tmp_path, text, sentence):
    path = tmp_path / "x.yml"
    path.write_text(text)
    with pytest.raises(DownloadError, match=sentence):
        Downloader().download_from_bos(path, str(tmp_path / "data"))


def test_only_yaml_files_that_are_there_are_read(tmp_path):
    with pytest.raises(UsageError, match=r"must end in .yaml or .yml"):
        Downloader().download_from_bos("config.json", str(tmp_path))
    with pytest.raises(DownloadError, match=r"none.yaml: No such file"):
        Downloader().download_from_bos(tmp_path / "none.yaml", str(tmp_path))


def test_a_yaml_that_would_unfold_without_end_is_refused_at_once(tmp_path):
    nested = "&a0 [l, l, l, l, l, l, l, l, l]"
    for depth in range(1, 12):
        nested = f"&a{depth} [{nested}, {', '.join([f'*a{depth - 1}'] * 8)}]"
    (tmp_path / "x.yaml").write_text(f"bos_path: {nested}\n")
    with pytest.raises(DownloadError, match=r"x.yaml: line 1, .* the alias \*a0 is not supported"):
        Downloader().download_from_bos(tmp_path / "x.yaml", str(tmp_path / "data"))


def test_a_yaml_from_afar_has_a_bounded_length(server, tmp_path):
    address = f"bos_path: {server.publish(TARS)}\n"
    server.files |= {"/short.yaml": (address + "#" * 1000).encode(), "/long.yaml": (address + "#" * MEGABYTE).encode()}
    for lengths in (True, False):
        server.lengths = lengths
        Downloader().download_from_bos(f"{server.url}/short.yaml", str(tmp_path / "data"))
        with pytest.raises(DownloadError, match=r"long\.yaml: longer than 1 MiB"):
            Downloader().download_from_bos(f"{server.url}/long.yaml", str(tmp_path / "data"))


@pytest.mark.parametrize(
    "address",
    [
        "http://a..b/x",
        "http://[::1/x",
        "http://me:secret@[::1/x",
        "http://127.0.0.1:port/x",
        f"http://{'a' * 70}.com/x",
        "file://[x/y",
        "nosuch://[::1/x",
    ],
)
def test_an_address_that_cannot_be_one_is_refused_at_once(bring, tmp_path, address):
    for call in (
        lambda: bring(address),
        lambda: Downloader().download_from_bos(f"{address}.yaml", str(tmp_path / "data")),
    ):
        with pytest.raises(DownloadError, match="address") as error:
            call()
        assert "secret" not in str(error.value)
        assert "attempts" not in str(error.value)


def test_a_redirection_to_what_is_no_address_is_refused(server, bring):
    address = server.publish({"a.bin": b"1"})
    server.faults["/set/a.bin"] = [("redirect", "http://[::1/x")]
    with pytest.raises(DownloadError, match=r"set/a\.bin: this address or a redirect is not valid"):
        bring(address)
    gc.collect()  # a connection that was left open would be told now


# --- the lists ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("filelist.txt", f"a.tar {'0' * 31}\n", "filelist.txt, line 1: .* must be a name and its md5"),
        ("filelist.txt", f"{'0' * 32}  a.tar\n", "must be a name and its md5"),
        ("filelist.txt", f"\n../a.tar {'0' * 32}\n", r"line 2: the name '\.\./a.tar' leaves the folder"),
        ("filelist.txt", f"/etc/a.tar {'0' * 32}\n", "the name '/etc/a.tar' leaves the folder"),
        ("filelist.txt", f"x/../../a.tar {'0' * 32}\n", "leaves the folder"),
        ("filelist.txt", f".fleetx-download/lock {'0' * 32}\n", "where fleetx keeps its own records"),
        ("filelist.txt", f"a {'0' * 32}\na {'1' * 32}\n", "'a' is listed twice with different sums"),
        ("filelist.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("meta.txt", "../../.bashrc\n", r"meta.txt, line 1: the name '\.\./\.\./\.bashrc' leaves the folder"),
        ("meta.txt", "/etc/passwd\n", "leaves the folder"),
    ],
)
def test_lists_with_bad_lines_are_refused_by_line(server, bring, tmp_path, name, text, sentence):
    address = server.publish(TARS)
    server.files[f"/set/{name}"] = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(DownloadError, match=sentence):
        bring(address)
    assert set(visible(tmp_path / "data")) <= {"filelist.txt", "meta.txt"}
    assert not (tmp_path / "a.tar").exists()


def test_lists_written_on_windows_are_read(server, bring):
    address = server.publish(TARS)
    server.files["/set/filelist.txt"] = b"\xef\xbb\xbf" + filelist(TARS).upper().replace(b"PART", b"part").replace(
        b".TAR", b".tar"
    ).replace(b"\n", b"\r\n")
    server.files["/set/meta.txt"] = b"train.txt\r\n\r\n"
    assert set(TARS) < set(visible(bring(address)))


@pytest.mark.parametrize("name", ["filelist.txt", "meta.txt"])
def test_a_folder_without_its_lists_is_refused(server, bring, name):
    address = server.publish(TARS)
    del server.files[f"/set/{name}"]
    with pytest.raises(
        DownloadError, match=rf"set/{name}: the server answered 404 .* must contain filelist.txt and meta"
    ):
        bring(address)


# --- addresses ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["file", "path", "memory"])
def test_any_address_that_fsspec_knows_is_downloaded_from(tmp_path, bring, scheme):
    address = {"file": f"file://{tmp_path}/remote", "path": f"{tmp_path}/remote", "memory": "memory://remote"}[scheme]
    fs, root = fsspec.core.url_to_fs(address)
    for name, data in {**TARS, "filelist.txt": filelist(TARS), "meta.txt": b"v.txt\n", "v.txt": b"[PAD]"}.items():
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/{name}", data)
    where = bring(address)
    assert (where / "train/4.txt").read_bytes() == b"x" * 104
    assert (where / "v.txt").read_bytes() == b"[PAD]"
    fs.rm(f"{root}/part-2.tar")
    (where / "part-2.tar").write_bytes(b"")
    with pytest.raises(DownloadError, match=r"remote/part-2.tar: FileNotFoundError") as error:
        bring(address)
    assert error.value.failed == ("part-2.tar",)


def test_a_part_is_continued_from_a_file_system_too(tmp_path, bring):
    remote = tmp_path / "remote"
    remote.mkdir()
    data = bytes(range(256)) * 4096
    for name, content in {"a.bin": data, "filelist.txt": filelist({"a.bin": data}), "meta.txt": b""}.items():
        (remote / name).write_bytes(content)
    part = tmp_path / "data/.fleetx-download/parts" / "a.bin" / md5(data)
    part.parent.mkdir(parents=True)
    part.write_bytes(data[:1000])
    assert (bring(f"file://{remote}") / "a.bin").read_bytes() == data
    assert not part.parent.exists()


def test_hadoops_yaml_is_read(tmp_path, capsys):
    remote = tmp_path / "remote"
    remote.mkdir()
    for name, data in {**TARS, "filelist.txt": filelist(TARS), "meta.txt": b""}.items():
        (remote / name).write_bytes(data)
    path = tmp_path / "hdfs.yaml"
    path.write_text(f"fs.default.name: file://\ndata_path: {remote}\nhadoop_home: /opt/hadoop\n")
    assert Downloader().download_from_hdfs(path, str(tmp_path / "data")) == str(tmp_path / "data")
    assert (tmp_path / "data/train/1.txt").exists()
    assert "ignoring hadoop_home: file:// does not need Hadoop" in capsys.readouterr().err


ROOT = {"data_path": "/d"}


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        (
            {"fs.default.name": "webhdfs://h:9870", **ROOT, "hadoop.job.ugi": "me"},
            ("webhdfs://h:9870/d", {"user": "me"}),
        ),
        (
            {"fs.default.name": "swebhdfs://h:1", **ROOT, "hadoop.job.ugi": "me,pass"},
            ("webhdfs://h:1/d", {"user": "me", "password": "pass", "use_https": True}),
        ),
        ({"fs.default.name": "hdfs://h:9000/", **ROOT, "hadoop.job.ugi": "me"}, ("hdfs://h:9000/d", {"user": "me"})),
    ],
)
def test_hadoops_settings_become_an_address_for_fsspec(monkeypatch, settings, address):
    monkeypatch.setenv("CLASSPATH", "/jars")
    found = config.hdfs(settings, shown="x.yaml")
    assert (found.url, found.options) == address
    assert "pass" not in repr(found)


def test_hadoops_homes_reach_libhdfs_through_the_environment(monkeypatch):
    for name in ("CLASSPATH", "JAVA_HOME", "HADOOP_HOME"):
        monkeypatch.setenv(name, "/before")
    config.hdfs({"fs.default.name": "hdfs://h", **ROOT, "java_home": "/j", "hadoop_home": "/h"}, shown="x.yaml")
    assert (os.environ["JAVA_HOME"], os.environ["HADOOP_HOME"]) == ("/j", "/h")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fs.default.name": "hdfs://h", **ROOT}, "needs Hadoop's Java classes: export CLASSPATH"),
        ({"fs.default.name": "webhdfs://h", **ROOT, "hadoop.job.ugi": "me,pass"}, "cannot send the password"),
        ({"fs.default.name": "file://", **ROOT, "hadoop.job.ugi": "me"}, "hadoop.job.ugi has no effect on file://"),
        ({"fs.default.name": "webhdfs://h"}, "data_path is missing"),
        ({"fs.default.name": "webhdfs://h", "data_path": "d"}, "data_path = 'd': must start with '/'"),
    ],
)
def test_hadoops_settings_that_cannot_be_honoured_are_refused(monkeypatch, settings, sentence):
    monkeypatch.delenv("CLASSPATH", raising=False)
    with pytest.raises(DownloadError, match=sentence) as error:
        config.hdfs(settings, shown="x.yaml")
    assert "me,pass" not in str(error.value)


@pytest.mark.parametrize(("scheme", "package"), [("hdfs", "pyarrow"), ("webhdfs", "requests")])
def test_a_file_system_whose_package_is_missing_is_refused_by_name(monkeypatch, tmp_path, scheme, package):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed here")
    monkeypatch.setenv("CLASSPATH", "/jars")
    path = tmp_path / "x.yaml"
    path.write_text(f"fs.default.name: {scheme}://127.0.0.1:9\ndata_path: /d\n")
    with pytest.raises(DownloadError, match=f"fsspec cannot open this address: .*{package}"):
        Downloader().download_from_hdfs(path, str(tmp_path / "data"))


def test_as_many_files_as_asked_for_come_at_once(server, bring):
    address = server.publish({f"{i}.bin": b"%d" % i for i in range(6)})
    server.faults |= {f"/set/{i}.bin": [("meet",)] for i in range(6)}  # two at once would wait for ever
    assert (bring(address, process_num=3) / "5.bin").read_bytes() == b"5"


# --- what a person sees -------------------------------------------------------------------------------
def test_a_disk_without_room_is_refused_before_the_first_file(server, bring, monkeypatch, tmp_path):
    usage = folder.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda _: usage._replace(free=3 * MEGABYTE))
    with pytest.raises(
        DownloadError, match=r"downloading and unpacking 1 files needs 4.0 MiB, .* has 3.0 MiB of disk space left"
    ):
        bring(server.publish({"a.tar": bytes(2 * MEGABYTE)}))
    assert server.got("set/a.tar") == []
    server.heads = False  # then the answer to the GET tells
    with pytest.raises(DownloadError, match=r"a.bin still needs 4.0 MiB, but .* has 3.0 MiB of disk space left"):
        bring(server.publish({"a.bin": bytes(4 * MEGABYTE)}, folder="other"))


class Terminal:
    def __init__(self, is_terminal):
        self.text, self.is_terminal = "", is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return self.is_terminal


@pytest.mark.parametrize(
    ("terminal", "rank", "bar"), [(True, "0", True), (True, "1", False), (False, "0", False), (True, None, True)]
)
def test_a_bar_is_drawn_by_the_first_worker_on_a_terminal(server, bring, monkeypatch, terminal, rank, bar):
    err = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    monkeypatch.setattr(node, "_HEAD_START", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    if rank:
        monkeypatch.setenv("PADDLE_RANK_IN_NODE", rank)
    bring(server.publish(TARS))
    assert ("━" in err.text) is bar
    assert ("fleetx: 5 of 5 files downloaded" in err.text) is not bar
    assert "fleetx: 5 files are in" in err.text


def test_secrets_in_addresses_are_not_shown(server, bring):
    address = server.publish(TARS).replace("http://", "http://me:secret@") + "?sign=hidden"
    del server.files["/set/part-1.tar"]
    with pytest.raises(DownloadError, match=r"set/part-1.tar: the server answered 404") as error:
        bring(address)
    assert not [word for word in ("secret", "hidden") if word in str(error.value)]


def test_a_password_in_the_address_is_sent_to_that_server_alone(server, bring):
    address = server.publish({"a.bin": b"1"})
    server.files["/elsewhere/a.bin"] = b"1"
    server.faults["/set/a.bin"] = [("redirect", f"{server.url}/elsewhere/a.bin")]
    bring(address.replace("http://", "http://me:se%20cret@"))
    expected = f"Basic {base64.b64encode(b'me:se cret').decode()}"
    assert {sent for path, sent in server.credentials if path.startswith("/set/")} == {expected}
    assert [sent for path, sent in server.credentials if path.startswith("/elsewhere/")] == [None]


def test_the_downloader_loads_nothing_heavy():
    code = "import sys, fleetx.utils; assert not {'torch', 'numpy', 'fsspec', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_utils_has_the_names_that_scripts_use():
    assert {"Downloader", "ImageNetDownloader", "WMTDataDownloader", "WikiDataDownloader"} < set(fleetx.utils.__all__)
    rate = fleetx.utils.linear_warmup_decay(1.0, 2, 4)
    assert (rate(1), rate(3), rate.name) == (0.5, 0.25, "scheduled_learning_rate")
    with pytest.raises(AttributeError, match=r"fleetx\.utils has no 'linear_warmup': it has Downloader"):
        _ = fleetx.utils.linear_warmup

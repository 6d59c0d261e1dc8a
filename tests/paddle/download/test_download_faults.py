"""A real server that drops, truncates, lies and refuses."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from file_server import MEGABYTE, Server, md5, tar

from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download import fetch
from fleetx.paddle.download.downloader import Downloader
from fleetx.paddle.download.fetch import Patience

DATA = bytes(range(256)) * (12 * 1024)  # 3 MB
PART = "data/.fleetx-download/parts"


def parts(tmp_path):
    return sorted(p.relative_to(tmp_path / PART).as_posix() for p in (tmp_path / PART).rglob("*") if p.is_file())


def test_a_dropped_connection_is_continued_where_it_broke(server, bring):
    server.faults["/set/a.bin"] = [("drop", 1000), ("drop", MEGABYTE), ("drop", 10)]
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    first, *later = server.got("set/a.bin")
    assert first is None
    assert later == [1000, 1000 + MEGABYTE, 1010 + MEGABYTE]


def test_drops_without_end_are_borne_as_long_as_bytes_come(server, bring, monkeypatch):
    monkeypatch.setattr(fetch, "_PROGRESS", 1000)
    server.faults["/set/a.bin"] = [("drop", 100_000)] * 20
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert len(server.got("set/a.bin")) == 21


def test_a_server_without_ranges_starts_again(server, bring):
    server.ranges = False
    server.faults["/set/a.bin"] = [("drop", 1000)]
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [None, 1000]  # asked for, answered with 200 and the whole


def test_a_range_that_is_not_the_one_asked_for_is_not_used(server, bring):
    server.faults["/set/a.bin"] = [("drop", 1000), ("elsewhere",)]
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [None, 1000, None]


def test_a_server_that_drops_always_is_given_up_with_the_part_kept_for_the_next_run(server, bring, tmp_path):
    address = server.publish({"a.bin": DATA})
    server.faults["/set/a.bin"] = [("drop", 5000), *[("drop", 0)] * 2]
    with pytest.raises(DownloadError, match=r"set/a.bin: gave up after 3 attempts: the connection ended after 5000 of"):
        bring(address)
    assert not (tmp_path / "data/a.bin").exists()
    assert parts(tmp_path) == [f"a.bin/{md5(DATA)}"]
    server.asked.clear()
    assert (bring(address) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [5000]
    assert parts(tmp_path) == []


def test_a_part_that_is_whole_already_is_checked_and_used(server, bring, tmp_path):
    path = tmp_path / PART / "a.bin" / md5(DATA)
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA)
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [len(DATA)]  # answered with 416: there is nothing more


@pytest.mark.parametrize("bad", [DATA + b"too long", b"?" * 1000], ids=["longer than the file", "other bytes"])
def test_a_part_that_is_wrong_is_brought_from_the_start(server, bring, tmp_path, bad):
    path = tmp_path / PART / "a.bin" / md5(DATA)
    path.parent.mkdir(parents=True)
    path.write_bytes(bad)
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [len(bad), None]


def test_a_part_of_another_version_is_not_continued(server, bring, tmp_path):
    path = tmp_path / PART / "a.bin" / ("0" * 32)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"of another version")
    bring(server.publish({"a.bin": DATA}))
    assert server.got("set/a.bin") == [None]
    assert parts(tmp_path) == []


@pytest.mark.parametrize("wrong", [b"?" * len(DATA), DATA[:-1], b""], ids=["other", "truncated", "empty"])
def test_a_wrong_sum_is_fetched_again_once(server, bring, wrong):
    server.faults["/set/a.bin"] = [("bytes", wrong)]
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [None, None]


def test_a_sum_that_stays_wrong_is_refused_with_both_sums(server, bring, tmp_path):
    server.faults["/set/a.tar"] = [("bytes", b"bad")] * 9
    good = tar({"x": b"1"})
    with pytest.raises(DownloadError) as error:
        bring(server.publish({"a.tar": good, "b.tar": tar({"y": b"2"})}))
    assert all(word in str(error.value) for word in ("set/a.tar", md5(b"bad"), md5(good), "twice"))
    assert error.value.failed == ("a.tar",)
    assert server.got("set/a.tar") == [None, None]
    assert not (tmp_path / "data/a.tar").exists()
    assert not (tmp_path / "data/x").exists()
    assert (tmp_path / "data/y").read_bytes() == b"2"  # the others are done
    assert parts(tmp_path) == []


def test_what_was_there_stays_if_the_new_version_cannot_be_had(server, bring, tmp_path):
    where = bring(server.publish({"a.bin": b"old"}))
    server.faults["/set/a.bin"] = [("bytes", b"bad")] * 2
    with pytest.raises(DownloadError, match="was downloaded twice"):
        bring(server.publish({"a.bin": b"new"}))
    assert (where / "a.bin").read_bytes() == b"old"


@pytest.mark.parametrize("code", [500, 503, 429])
def test_a_busy_server_is_asked_again(server, bring, code):
    server.faults["/set/a.bin"] = [("status", code)] * 2
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [None] * 3


@pytest.mark.parametrize("code", [404, 403, 401, 410])
def test_a_refusal_is_final(server, bring, code):
    server.faults["/set/a.bin"] = [("status", code)] * 9
    with pytest.raises(DownloadError, match=rf"set/a.bin: the server answered {code}"):
        bring(server.publish({"a.bin": DATA}))
    assert server.got("set/a.bin") == [None]


def test_all_files_that_failed_are_told_together(server, bring):
    files = {f"{i}.bin": bytes([i]) for i in range(6)}
    server.faults |= {"/set/1.bin": [("status", 500)] * 9, "/set/3.bin": [("status", 403)]}
    with pytest.raises(DownloadError, match="2 of 6 files failed:") as error:
        bring(server.publish(files), process_num=2)
    assert "/set/1.bin: gave up after 3 attempts: 500" in str(error.value)
    assert "/set/3.bin: the server answered 403" in str(error.value)
    assert error.value.failed == ("1.bin", "3.bin")


def test_a_server_that_is_not_there_is_given_up_in_bounded_time(bring, server):
    address = server.publish({"a.bin": DATA})
    server.stop()
    with pytest.raises(DownloadError, match=r"set/filelist.txt: gave up after 3 attempts: .*refused"):
        bring(address)


def test_lists_and_meta_files_are_whole_or_not_there(server, bring):
    """They have no sum, so only the announced length can tell; they are never continued."""
    address = server.publish({"a.bin": DATA}, meta={"vocab.txt": DATA})
    server.faults |= {"/set/filelist.txt": [("drop", 5)], "/set/vocab.txt": [("drop", 1000), ("status", 500)]}
    assert (bring(address) / "vocab.txt").read_bytes() == DATA
    assert server.got("set/filelist.txt") == [None, None]
    assert server.got("set/vocab.txt") == [None, None, None]


def test_a_server_that_tells_no_lengths_is_caught_by_the_sum(server, bring):
    server.lengths = server.heads = False
    server.faults["/set/a.bin"] = [("drop", 1000)]
    assert (bring(server.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA


def test_a_stalled_server_counts_as_a_dropped_connection(server, tmp_path):
    server.faults["/set/a.bin"] = [("hold", 1000)]
    config = tmp_path / "x.yaml"
    config.write_text(f"bos_path: {server.publish({'a.bin': DATA})}")
    hasty = Downloader(patience=Patience(attempts=3, pause=0.01, timeout=2))
    hasty.download_from_bos(config, str(tmp_path / "data"))
    assert (tmp_path / "data/a.bin").read_bytes() == DATA
    assert server.got("set/a.bin") == [None, 1000]


def test_patience_must_make_sense():
    with pytest.raises(UsageError, match="attempts must be at least 1"):
        Patience(attempts=0)


# --- redirections and certificates --------------------------------------------------------------------
def test_a_redirection_is_followed_with_its_range(server, bring):
    server.files["/store/a.bin"] = DATA
    address = server.publish({"a.bin": DATA})
    server.faults["/set/a.bin"] = [("redirect", f"{server.url}/store/a.bin")] * 2
    server.faults["/store/a.bin"] = [("drop", 1000)]
    assert (bring(address) / "a.bin").read_bytes() == DATA
    assert server.got("store/a.bin") == [None, 1000]


def test_a_redirection_to_a_local_file_is_refused(server, bring):
    address = server.publish({"a.bin": DATA})
    server.faults["/set/a.bin"] = [("redirect", "file:///etc/passwd")]
    with pytest.raises(DownloadError, match=r"set/a.bin: redirects to file:///etc/passwd, which is not http or https"):
        bring(address)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """One that nobody signed but itself, for 127.0.0.1."""
    if not shutil.which("openssl"):
        pytest.skip("the openssl program is not here to make a certificate")
    where = tmp_path_factory.mktemp("certificate")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", "key", "-out", "pem"], cwd=where, check=True, capture_output=True)
    return where / "pem", where / "key"


@pytest.fixture
def secure(certificate):
    served = Server(certificate=certificate)
    yield served
    served.stop()


def test_a_certificate_that_nobody_vouches_for_is_refused(secure, bring):
    with pytest.raises(DownloadError, match=r"filelist.txt: the server's certificate is not trusted \(self.signed"):
        bring(secure.publish({"a.bin": DATA}))
    assert secure.asked == []


def test_a_certificate_of_an_authority_that_the_user_names_is_accepted(secure, bring, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    assert (bring(secure.publish({"a.bin": DATA})) / "a.bin").read_bytes() == DATA


def test_https_is_not_left_for_http(secure, server, bring, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    address = secure.publish({"a.bin": DATA})
    secure.faults["/set/a.bin"] = [("redirect", f"{server.publish({'a.bin': DATA})}/a.bin")]
    with pytest.raises(DownloadError, match=r"which is not https$"):
        bring(address)
    assert server.asked == []

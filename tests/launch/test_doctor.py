"""`fleetx doctor` says what is wrong with a machine, and with a set of them."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from click.testing import CliRunner

from fleetx.cli import main
from fleetx.errors import LaunchError
from fleetx.launch import doctor


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


@pytest.fixture
def served():
    with doctor.serve("127.0.0.1", 0, None) as server:
        yield server.server_address[1]
        server.shutdown()


def test_this_machine(tmp_path):
    done = run("--folder", tmp_path)
    assert done.exit_code == 0, done.output
    for what in ("fleetx", "torch", "driver", "host name", "loopback", "ports", "memory", "/dev/shm", "open files"):
        assert f"  {what}: " in done.output
    assert f"folder: {tmp_path} can be written" in done.output


def test_json_has_the_same(tmp_path):
    done = run("--json", "--folder", tmp_path / "absent")
    assert done.exit_code == 1
    (findings,) = json.loads(done.output).values()
    folder = next(f for f in findings if f["what"] == "folder")
    assert folder["fatal"]
    assert "No such file" in folder["value"]


def test_another_machine_answers_with_its_versions_and_its_link(served):
    found, known = doctor.check_host("127.0.0.1", served)
    assert known == doctor.versions()
    assert "answers" in str(found[0])
    assert "Gbit/s" in found[1].value
    assert not found[1].fix
    assert {"memory", "open files"} <= {f.what for f in found}


def test_a_machine_that_does_not_answer_is_named_with_what_to_do():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = run("127.0.0.1", "--port", port)
    assert done.exit_code == 1
    assert "start `fleetx doctor --listen 127.0.0.1` there" in done.output


def test_a_name_that_does_not_resolve():
    (finding,), known = doctor.check_host("no-such-host.invalid", 1)
    assert finding.fatal
    assert "does not resolve" in finding.value
    assert known == {}


def test_another_program_on_that_port():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            for _ in range(5):
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")
                connection.recv(64)
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        (finding,), _ = doctor.check_host("127.0.0.1", server.getsockname()[1])
    assert finding.fatal


def test_versions_that_differ_are_named():
    (finding,) = doctor.differences({"a": doctor.versions(), "b": doctor.versions() | {"torch": "2.12.1"}})
    assert finding.what == "torch"
    assert "2.12.1 on b" in finding.value
    assert finding.fatal


@pytest.mark.parametrize("several", [False, True])
def test_a_host_name_on_loopback_matters_only_to_several_machines(monkeypatch, several):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    finding = doctor._host_name(several)
    assert bool(finding.fix) is several
    assert "127.0.1.1" in finding.value


def test_a_port_in_use_is_refused(served):
    with pytest.raises(LaunchError, match="Address already in use"):
        doctor.serve("127.0.0.1", served, None)
    done = run("--listen", "127.0.0.1", "--port", served)
    assert done.exit_code == 1
    assert "Choose another with --port" in done.output


def test_help_says_how_to_ask_other_machines():
    done = run("--help")
    assert done.exit_code == 0
    assert "--listen ADDRESS" in done.output

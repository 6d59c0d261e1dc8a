from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleetx import DistributedStrategy, __version__, fleet
from fleetx.cli import main


def run(*args):
    return CliRunner().invoke(main, args)


def test_explain_prints_the_plan_of_a_file(tmp_path):
    path = tmp_path / "s.yaml"
    strategy = DistributedStrategy(amp=True, clip=True)
    strategy.save(path)
    result = run("explain", str(path))
    assert result.exit_code == 0
    assert result.output.strip() == str(fleet.explain(strategy)).strip()


def test_explain_reports_errors_without_a_traceback(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("amp: true\nlarrs: true\nlocalsgd: {k_steps: 0}\n")
    result = run("explain", str(path))
    assert result.exit_code == 1
    assert "did you mean 'lars'?" in result.output
    assert "k_steps'] = 0" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("args", "code", "text"), [(["--version"], 0, __version__), (["--help"], 0, "explain")])
def test_version_and_help(args, code, text):
    result = run(*args)
    assert result.exit_code == code
    assert text in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "option", "text"),
    [("fleetrun", "--version", f"version {__version__}\n"), ("fleetx", "--help", "explain")],
)
def test_the_installed_commands_start(tmp_path, command, option, text):
    """As pip has written them. The other tests fork a process that has imported fleetx."""
    program = Path(sysconfig.get_path("scripts")) / command
    done = subprocess.run([program, option], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stderr) == (0, "")
    assert text in done.stdout


def test_a_missing_file_is_an_error():
    result = run("explain", "nowhere.yaml")
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output

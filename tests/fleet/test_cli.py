from __future__ import annotations

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


def test_a_missing_file_is_an_error():
    result = run("explain", "nowhere.yaml")
    assert result.exit_code == 2
    assert "nowhere.yaml" in result.output

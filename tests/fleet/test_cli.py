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
    found = run("explain", str(path))
    assert found.exit_code == 0
    assert found.output.strip() == str(fleet.explain(strategy)).strip()


def test_explain_says_what_is_wrong_without_a_traceback(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("amp: true\nlarrs: true\nlocalsgd: {k_steps: 0}\n")
    found = run("explain", str(path))
    assert found.exit_code == 1
    assert "did you mean 'lars'?" in found.output
    assert "k_steps'] = 0" in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize(("args", "code", "text"), [(["--version"], 0, __version__), (["--help"], 0, "explain")])
def test_it_introduces_itself(args, code, text):
    found = run(*args)
    assert found.exit_code == code
    assert text in found.output


def test_a_missing_file_is_named():
    found = run("explain", "nowhere.yaml")
    assert found.exit_code == 2
    assert "nowhere.yaml" in found.output

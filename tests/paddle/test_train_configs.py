from __future__ import annotations

import sys

import pytest

from fleetx.paddle.train_configs import parse_train_configs


def parse(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    return parse_train_configs()


def test_the_defaults_are_paddles(monkeypatch):
    assert vars(parse(monkeypatch)) == {
        "lr": 0.0001,
        "momentum": 0.9,
        "beta1": 0.9,
        "beta2": 0.997,
        "batch_size": 32,
        "epsilon": 1e-9,
        "download_config": None,
    }


def test_arguments_are_read_from_the_scripts_command_line(monkeypatch):
    configs = parse(monkeypatch, "--lr", "0.5", "--batch_size=8", "--download_config", "data.yaml")
    assert (configs.lr, configs.batch_size, configs.download_config) == (0.5, 8, "data.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--batch-size", "8"],
            "unknown argument --batch-size (did you mean --batch_size?): the arguments are --lr, --mom",
        ),
        (["--momentun=0.8"], "unknown argument --momentun (did you mean --momentum?)"),
        (["--beta", "1"], "unknown argument --beta (did you mean --beta"),  # no abbreviations: there are two
        (["--learning_rate", "0.1"], "unknown argument --learning_rate (did you mean --lr?)"),
        (["--bs=4"], "unknown argument --bs (did you mean --batch_size?)"),
        (
            ["--zzz"],
            "unknown argument --zzz: the arguments are --lr, --momentum, --beta1, --beta2, --batch_size, --eps",
        ),
        (["stray"], "unknown argument stray"),
        (["--lr", "fast"], "argument --lr: fast: must be a number of at least 0"),
        (["--lr", "inf"], "argument --lr: inf: must be a number of at least 0"),
        (["--beta1", "1"], "argument --beta1: 1: must be a number of at least 0 and below 1"),
        (["--beta2", "-0.5"], "argument --beta2: -0.5: must be a number of at least 0 and below 1"),
        (["--batch_size", "3.5"], "argument --batch_size: 3.5: must be an integer of at least 1"),
        (["--lr", "nan"], "argument --lr: nan: must be a number of at least 0"),
        (["--batch_size", "0"], "argument --batch_size: 0: must be an integer of at least 1"),
    ],
    ids=" ".join,
)
def test_what_it_does_not_know_ends_the_script_with_the_nearest_name(monkeypatch, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, *words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_help_helps(monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, "--help")
    assert end.value.code == 0
    assert "--epsilon" in (said := capsys.readouterr().out)
    assert "(default: 0.997)" in " ".join(said.split())

"""Children that answer, fail, hang and die."""

from __future__ import annotations

import os
import signal
import time

import psutil
import torch

from fleetx.measure.child import forked


def test_a_child_answers_with_what_it_computed_on_the_parents_objects():
    model = torch.nn.Linear(64, 64)
    x = torch.randn(32, 64)
    (model(x).sum()).backward()  # the parent has used autograd and its threads
    expected = model(x).sum().item()

    def call():
        found = model(x).sum()
        found.backward()
        with torch.no_grad():
            model.weight.zero_()
        return found.item()

    assert forked(call, seconds=60).value == expected
    assert model.weight.abs().sum() > 0, "what the child changes stays its own"


def test_a_child_has_as_many_threads_as_its_parent_and_they_work():
    a = torch.randn(600, 600)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = (a @ a).sum().item()
        answer = forked(lambda: [torch.get_num_threads(), (a @ a).sum().item()], seconds=60)
    finally:
        torch.set_num_threads(before)
    assert answer.value == [2, expected]


def test_an_error_is_returned_as_text():
    def call():
        raise KeyError("no such thing")

    assert "no such thing" in forked(call, seconds=60).error


def test_a_child_that_is_killed_may_have_run_out_of_memory():
    assert (
        "killed, probably for lack of memory" in forked(lambda: os.kill(os.getpid(), signal.SIGKILL), seconds=60).error
    )


def test_a_child_that_runs_out_of_memory_says_so():
    assert forked(lambda: torch.empty(1 << 46).shape[0], seconds=60).error == "it ran out of memory"


def test_a_child_that_hangs_is_killed():
    others = psutil.Process().children()
    assert "more than 1 s" in forked(lambda: time.sleep(3600), seconds=1).error
    assert psutil.Process().children() == others


def test_a_child_has_the_autocast_of_its_parent():
    a = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert forked(lambda: str((a @ a).dtype), seconds=60).value == "torch.bfloat16"

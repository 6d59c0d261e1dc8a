"""Children that answer, fail, hang and die."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import get_context

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fleetx import fleet
from fleetx.measure.child import forked
from forking import forks


def trains_after_fake_tensors():
    """With torch for CUDA on a machine without a GPU, this was an error of torch in the child."""
    fleet.init()
    with FakeTensorMode():
        torch.empty(1)
    x = torch.ones(1, requires_grad=True)
    x.sum().backward()
    answer = forked(lambda: x.sum().backward() or "fine", seconds=60)
    assert answer.value == "fine", answer.error


def test_a_child_trains_although_fake_tensors_were_used_before_the_first_backward():
    process = get_context(forks()).Process(target=trains_after_fake_tensors)  # in which autograd has not started
    process.start()
    process.join()
    assert process.exitcode == 0


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

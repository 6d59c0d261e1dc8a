from __future__ import annotations

import threading

import pytest

from fleetx.base.call_with_timeout import CallerThread, NoAnswerError


def test_a_call_returns_its_result_or_raises_its_error():
    thread = CallerThread()
    assert thread.call(divmod, 7, 2, seconds=60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        thread.call(divmod, 7, 0, seconds=60)


def test_after_a_call_without_an_answer_no_other_is_tried():
    thread, event = CallerThread(), threading.Event()
    with pytest.raises(NoAnswerError):
        thread.call(event.wait, seconds=0.05)
    with pytest.raises(NoAnswerError):
        thread.call(int, seconds=60)
    event.set()

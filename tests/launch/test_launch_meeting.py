"""What several nodes agree on, without sockets and without waiting: the clock is ours."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetx.launch.meeting import GATHER, GONE_AFTER, LOST_AFTER, Meeting, MeetingError

SETTINGS = {"address": "a", "workers": 2, "nodes": 3, "elastic": None, "max_restarts": 1, "version": "1"}


class Nodes:
    """A meeting and its clock; `run` starts an attempt with all who have joined."""

    def __init__(self, *, nodes=3, minimum=3):
        self.now = 100.0
        self.meeting = Meeting(nodes=nodes, minimum=minimum, clock=lambda: self.now)
        self.call = self.meeting.call

    def join(self, *nodes, token="t", **settings):
        for node in nodes:
            number = self.call("join", node, token=f"{token}{node}", settings={**SETTINGS, **settings})
            self.call("arrive", node, attempt=number + 1, failed=False)

    def run(self):
        members = self.meeting.ready()
        assert members is not None
        self.meeting.publish(members, port=1, run_id="r")
        return self.call("look", 0, attempt=0)["plan"]

    def restart(self, node=0):
        return self.call("look", node, attempt=0)["restart"]

    def stop(self):
        return self.call("look", 0, attempt=0)["stop"]

    def pass_time(self, seconds, *, seen=()):
        for _ in range(int(seconds)):
            self.now += 1.0
            for node in seen:
                self.call("look", node, attempt=0)


def test_an_attempt_starts_when_all_nodes_are_there():
    nodes = Nodes()
    nodes.join(0, 2)
    assert nodes.meeting.ready() is None
    assert nodes.call("look", 0, attempt=0)["missing"] == [1]
    nodes.join(1)
    assert nodes.run()["members"] == [0, 1, 2]
    assert nodes.restart() is None


@pytest.mark.parametrize("how", ["lost", "told to stop"])
def test_a_node_that_is_gone_just_before_an_attempt_is_not_in_it(how):
    nodes = Nodes(minimum=2)
    nodes.join(0, 1, 2)
    members = nodes.meeting.ready()
    if how == "lost":
        nodes.pass_time(LOST_AFTER + 1, seen=(0, 1))
    else:
        nodes.call("depart", 2, reason="SIGTERM")
        nodes.pass_time(GATHER + 1, seen=(0, 1))
    assert not nodes.meeting.publish(members, port=1, run_id="r")
    assert nodes.run()["members"] == [0, 1]


def test_a_failure_on_one_node_restarts_all_and_counts_once():
    nodes = Nodes()
    nodes.join(0, 1, 2)
    nodes.run()
    for node in (1, 2):
        nodes.call("arrive", node, attempt=1, failed=True)
        assert nodes.restart() == "failure"
        assert nodes.meeting.ready() is None
    nodes.call("arrive", 0, attempt=1, failed=False)
    plan = nodes.run()
    assert (plan["number"], plan["restarts"], plan["members"]) == (1, 1, [0, 1, 2])


def test_a_silent_node_stops_a_job_that_needs_it():
    nodes = Nodes()
    nodes.join(0, 1, 2)
    nodes.run()
    nodes.pass_time(4 * LOST_AFTER, seen=(1, 2))
    assert nodes.stop() is None
    nodes.pass_time(LOST_AFTER + 2, seen=(1,))
    assert nodes.stop()["reason"] == "lost node 2: its fleetrun or its machine does not respond"


def test_a_closed_connection_is_lost_soon_unless_it_comes_back():
    nodes = Nodes()
    nodes.join(0, 1, 2)
    nodes.run()
    nodes.meeting.disconnected(1, "t1")
    nodes.meeting.disconnected(2, "somebody else's")
    nodes.pass_time(1, seen=(2,))
    nodes.call("join", 1, token="t1", settings=SETTINGS)
    nodes.pass_time(GONE_AFTER + 3, seen=(1, 2))
    assert nodes.stop() is None
    nodes.meeting.disconnected(1, "t1")
    nodes.pass_time(GONE_AFTER + 2, seen=(2,))
    assert nodes.stop()["reason"].startswith("lost node 1")


def test_an_elastic_job_goes_on_without_a_lost_node_and_takes_it_back():
    nodes = Nodes(minimum=2)
    nodes.join(0, 1)
    assert nodes.meeting.ready() is None  # node 2 may be about to come
    nodes.pass_time(GATHER + 1, seen=(1,))
    assert nodes.run()["members"] == [0, 1]
    nodes.join(2)
    assert nodes.restart() == "resize"
    for node in (0, 1):
        nodes.call("arrive", node, attempt=1, failed=False)
    assert nodes.run()["members"] == [0, 1, 2]

    nodes.meeting.disconnected(1, "t1")
    nodes.pass_time(GONE_AFTER + 1, seen=(2,))
    assert nodes.restart() == "loss"
    nodes.call("arrive", 2, attempt=2, failed=True)  # its workers lost their peers
    nodes.call("arrive", 0, attempt=2, failed=False)
    plan = nodes.run()
    assert (plan["members"], plan["restarts"]) == ([0, 2], 0)
    with pytest.raises(MeetingError, match="node 1 was considered lost"):
        nodes.call("look", 1, attempt=1)
    nodes.join(1, token="new")
    for node in (0, 2):
        nodes.call("arrive", node, attempt=3, failed=False)
    assert nodes.run()["members"] == [0, 1, 2]
    assert nodes.stop() is None


def test_below_the_minimum_an_elastic_job_waits():
    nodes = Nodes(minimum=2)
    nodes.join(0, 1, 2)
    nodes.run()
    nodes.pass_time(LOST_AFTER + 2)
    nodes.call("arrive", 0, attempt=1, failed=True)
    assert nodes.meeting.ready() is None
    assert nodes.stop() is None
    nodes.join(2, token="new")
    assert nodes.run()["members"] == [0, 2]


def test_a_node_that_is_told_to_stop_stops_the_job_unless_it_is_elastic():
    nodes = Nodes()
    nodes.join(0, 1, 2)
    nodes.run()
    nodes.call("depart", 1, reason="stopped by SIGTERM", signal=15)
    assert nodes.stop() == {"node": 1, "reason": "stopped by SIGTERM", "signal": 15}

    elastic = Nodes(minimum=2)
    elastic.join(0, 1, 2)
    elastic.run()
    elastic.call("depart", 1, reason="stopped by SIGTERM", signal=15)
    assert (elastic.stop(), elastic.restart()) == (None, "resize")
    for node in (0, 2):
        elastic.call("arrive", node, attempt=1, failed=False)
    assert elastic.run()["members"] == [0, 2]
    elastic.call("depart", 2, reason="stopped by SIGTERM", signal=15)  # one remains, two are needed
    assert elastic.stop()["signal"] == 15


def test_when_the_first_workers_have_finished_nobody_is_taken_in():
    nodes = Nodes(minimum=1)
    nodes.join(0, 1)
    nodes.pass_time(GATHER + 1, seen=(1,))
    nodes.run()
    nodes.call("done", 1, attempt=0)
    nodes.join(2)
    assert nodes.restart() is None
    assert not nodes.call("look", 2, attempt=1)["done"]
    nodes.call("done", 0, attempt=0)
    assert nodes.call("look", 2, attempt=1)["done"]


def test_a_rank_that_is_used_twice_and_other_settings_are_refused():
    nodes = Nodes()
    nodes.join(0, 1)
    with pytest.raises(MeetingError, match="--rank 1 is used by two nodes"):
        nodes.join(1, token="other")
    with pytest.raises(MeetingError, match="--rank 3: must be less than"):
        nodes.join(3)
    with pytest.raises(MeetingError, match="node 2 was started with 5 workers, node 0 with 2"):
        nodes.join(2, workers=5)
    assert "was started with 5 workers" in nodes.stop()["reason"]


CALLS = st.sampled_from([*Meeting.CALLS, "ready", "publish", "_drop_lost", "__init__", ""])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.text(max_size=3), st.just(SETTINGS), st.just([]))
NAMES = st.sampled_from(["attempt", "failed", "reason", "signal", "failures", "token", "settings", "x"])


@given(st.lists(st.tuples(CALLS, st.integers(-1, 4), st.dictionaries(NAMES, VALUES, max_size=3), st.floats(0, 20))))
def test_no_sequence_of_calls_breaks_the_meeting(calls):
    nodes = Nodes(minimum=2)
    nodes.join(0, 1)
    for name, node, arguments, seconds in calls:
        nodes.now += seconds
        with contextlib.suppress(MeetingError, TypeError, AttributeError):  # the server refuses such calls
            nodes.call(name, node, **arguments)
        if members := nodes.meeting.ready():
            nodes.meeting.publish(members, port=1, run_id="r")
            assert 2 <= len(members) <= 3
            assert members == sorted(set(members))
        assert nodes.call("look", 0, attempt=0).keys() == {"stop", "plan", "restart", "done", "missing"}

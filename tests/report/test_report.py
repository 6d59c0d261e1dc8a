"""fleetx report: what it computes from a record, and that it is one file that needs nothing."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner
from made_up import EVIL, write

from fleetx.cli import main
from fleetx.record.read import read
from fleetx.report import facts, page, svg


class Parsed(HTMLParser):
    """Tags, attributes and text, with what is opened and not closed."""

    VOID = {"meta", "link", "br"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def html(tmp_path, **options):
    return page.page([read(write(tmp_path / "run", **options))])


def test_the_page_is_well_formed_and_needs_nothing_else(tmp_path):
    text = html(tmp_path)
    parsed = Parsed(text)
    assert not parsed.open
    assert "script" not in parsed.tags
    names = {name for name, _ in parsed.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert {value for name, value in parsed.attributes if name in ("src", "href")} == {"data:,"}
    assert "url(http" not in text
    assert "@import" not in text


def test_what_a_record_says_is_escaped(tmp_path):
    text = html(tmp_path)
    assert EVIL not in text
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 6  # name, act, explanation, event, value, command


def test_every_part_is_there(tmp_path):
    text = html(tmp_path)
    plots = set(re.findall(r'data-plot="([a-z]+)"', text))
    assert {"loss", "rate", "norm", "scale", "k", "sent", "throughput"} <= plots
    assert {"time", "step", "memory", "network", "events"} <= plots
    assert "limit the norm" in text
    assert "clip_norm: 1.0" in text
    assert "OMP_NUM_THREADS=1" in text


def test_the_memory_of_a_step_is_compared_with_what_was_predicted(tmp_path):
    text = html(tmp_path)
    assert "<td>peak of a step, as predicted</td><td>3 MiB</td>" in text
    assert "<td>rank 1: what training added, with the parameters</td><td>51 MiB</td>" in text  # 300 - 250 + 1


def test_a_peak_that_was_not_predicted_has_its_reason(tmp_path):
    record = read(write(tmp_path / "run"))
    del record.plans[0]["predicted"]
    record.plans[0]["unpredicted"] = "it reads <values>"
    for records in ([record], [record, read(write(tmp_path / "other"))]):
        assert "was not predicted: it reads &lt;values&gt;." in page.page(records).replace(" of run", "")


def test_ranks_that_predict_for_themselves_are_shown_one_by_one(tmp_path):
    record = read(write(tmp_path / "run", pipeline=True))
    record.ranks[1][-1]["predicted"] = 2 << 20
    text = page.page([record])
    assert "<td>rank 0: peak of a step, as predicted</td><td>3 MiB</td>" in text
    assert "<td>rank 1: peak of a step, as predicted</td><td>2 MiB</td>" in text


def test_a_straggler_is_named_and_ranks_that_are_equal_are_not(tmp_path):
    assert "No rank straggles" in html(tmp_path / "a")
    text = html(tmp_path / "b", slow=1.5, ranks=3)
    assert re.search(r"<strong>rank 2</strong> \(node2\): its own work takes 1\.4\d times", text)
    assert "<strong>rank 1</strong>" not in text


def test_the_plan_of_an_update_is_drawn_in_its_order(tmp_path):
    record = read(write(tmp_path / "run"))
    record.plans[0] |= {"window": 4, "acts": [["GRADIENT", "clip", "limit it"], ["WIRE", "dgc", "send the largest"]]}
    (flow,) = re.findall(r'<ol class="flow">(.*?)</ol>', page.page([record]))
    boxes = re.findall(r'<li class="(\w*)">([^<]*)<ul>(.*?)</ul>', flow)
    assert [(kind, name) for kind, name, _ in boxes] == [
        ("", "forward, 4 times"), ("", "backward, 4 times"), ("net", "between ranks"), ("", "gradient"), ("", "update")
    ]  # fmt: skip
    assert re.findall(r"<strong>(\w+)", boxes[2][2]) == ["data_parallel", "dgc"]
    assert boxes[3][2] == "<li><strong>clip</strong>: limit it</li>"


def test_the_schedule_of_a_pipeline_is_drawn(tmp_path):
    text = html(tmp_path, pipeline=True)
    assert "rank 1 stages" in text
    assert "rank 0: F2/0" in text


def test_runs_are_compared_side_by_side(tmp_path):
    records = [read(write(tmp_path / name, slow=slow)) for name, slow in (("first", 1.0), ("second", 2.0))]
    text = page.page(records)
    assert not Parsed(text).open
    assert text.count('class="line c1"') >= 6  # the second run in every plot
    assert "<th>A: first</th><th>B: second</th>" in text


def test_a_run_that_has_hardly_begun_has_a_page(tmp_path):
    write(tmp_path / "run", rounds=1)
    first = (tmp_path / "run" / "rank0.jsonl").read_text().splitlines()[0]
    (tmp_path / "run" / "rank0.jsonl").write_text(first + "\n")
    text = page.page([read(tmp_path / "run")])
    assert "No updates yet" in text
    assert "Nothing is distributed yet" in text


def test_thinning_keeps_the_ends_and_the_extremes():
    points = [(float(i), math.sin(i / 7)) for i in range(10_000)]
    points[5000] = (5000.0, 99.0)
    thin = facts.thinned(points)
    assert len(thin) <= facts.MOST_POINTS + 2
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert (5000.0, 99.0) in thin
    assert facts.thinned(points[:5]) == points[:5]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (5.0, 5.0), (-3e-9, 2e-9), (1e30, 2e30), (0.0, 0.0), (-7.0, -2.0)]
)
def test_a_scale_contains_its_values(low, high):
    least, most, ticks = svg.scale(low, high)
    assert least <= low
    assert most >= high
    assert most > least
    assert 2 <= len(ticks) <= 7


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 12_345), (9e-5, 1.1e-4), (-1e-4, 1.2e-4), (2.30001, 2.30009), (1e30, 2e30), (999, 1005), (0, 0)],
)
def test_labels_of_an_axis_are_short_and_right(low, high):
    *_, ticks = svg.scale(low, high)
    shown = svg.labels(ticks)
    assert max(map(len, shown)) <= 7
    assert list(map(float, shown)) == pytest.approx(ticks, abs=(ticks[1] - ticks[0]) / 20)


def test_values_that_are_not_finite_are_seen(tmp_path):
    points = [(float(i), math.nan if i in (700, 999) else 1.0 / i) for i in range(1, 1000)]
    text = svg.curve("loss", [svg.Series("run", points)])
    assert text.count("<path") == 2
    assert ">999<" in text  # the last update, which has no value
    assert "1 not finite (crosses), first at update 7" in html(tmp_path)


def test_throughput_counts_all_replicas_and_no_evaluation(tmp_path):
    record = read(write(tmp_path / "run"))
    record.rounds[1]["time"] = record.rounds[1]["time"] | {"other": 0.04}
    found = dict(facts.throughput(record))
    assert found[2] == pytest.approx(32 * 2 / 0.05)
    assert found[3] == pytest.approx(32 * 2 / 0.09)


def test_the_samples_of_an_update_are_the_usual_ones(tmp_path):
    record = read(write(tmp_path / "run"))
    record.rounds[-1]["samples"] = 1
    assert facts.summary(record)["samples per update"] == "64"


def test_the_command_writes_one_file_and_says_what_is_wrong(tmp_path):
    run = write(tmp_path / "run")
    done = CliRunner().invoke(main, ["report", str(run)])
    assert done.exit_code == 0, done.output
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    done = CliRunner().invoke(main, ["report", str(run), str(run)])
    assert done.exit_code == 0, done.output
    assert "A: run" not in (run / "report.html").read_text()
    assert "A: run" in (run / "compared.html").read_text()


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("nothing", "nothing does not exist: call fleet.record("),
        ("rum", "rum does not exist: did you mean run? Otherwise, call fleet.record("),
        ("empty", "empty has no rank0.jsonl: call fleet.record("),
        (".", "{0} is not a run, but has some in it: give one or more of {0}/run"),
        ("run/rank0.jsonl", "rank0.jsonl is a file: give the folder of a run: {0}/run"),
        ("note.txt", "note.txt is a file: give the folder of a run\n"),
    ],
)
def test_a_path_that_is_no_run_is_answered_by_what_is_there(tmp_path, given, answer):
    write(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").touch()
    done = CliRunner().invoke(main, ["report", str(tmp_path / given)])
    assert done.exit_code == 1
    assert answer.format(tmp_path) in done.output


def test_live_waits_for_a_run_to_begin(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(page.time, "sleep", lambda seconds: write(tmp_path / "run"))
    page.write([tmp_path / "run"], tmp_path / "report.html", live=True, say=said.append)
    assert (tmp_path / "report.html").exists()
    assert len(said) == 1
    assert "waiting for a run to begin" in said[0]


def test_lines_that_were_left_out_are_told(tmp_path):
    run = write(tmp_path / "run", ends=False)
    assert "cannot be read" not in page.page([read(run)])
    with open(run / "rank0.jsonl", "a") as file:
        file.write('{"kind": "round"}\n')
    text = page.page([read(run)])
    assert "cannot be read are left out (1)" in text
    assert "running, or killed; last line at" in text


def test_live_goes_on_until_the_run_has_ended(tmp_path, monkeypatch):
    run, written = write(tmp_path / "run", ends=False), []

    def wait(seconds):
        written.append((run / "report.html").read_text())
        write(run)  # now it has ended

    monkeypatch.setattr(page.time, "sleep", wait)
    page.write([run], run / "report.html", live=True)
    assert 'http-equiv="refresh"' in written[0]
    assert 'http-equiv="refresh"' not in (run / "report.html").read_text()

"""The page of a run in a real browser."""

from __future__ import annotations

import json

import pytest
from chromium import PROGRAM, Chromium
from made_up import EVIL, lines, write

from fleetx.record.read import read
from fleetx.report import page

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Debian's chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Chromium(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [write(folder / "first", slow=1.5), write(folder / "second", pipeline=True)]
    for name, chosen in (("one", runs[:1]), ("two", runs)):
        (folder / f"{name}.html").write_text(page.page([read(run) for run in chosen]))
    return folder


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [380, 1200])
def test_it_opens_without_a_complaint_and_fits(browser, report, name, width, dark):
    browser.open(report / f"{name}.html", width=width, dark=dark)
    assert browser.problems == []
    assert {url.partition(":")[0] for url in browser.loaded} <= {"file", "data"}
    assert browser.ask("document.documentElement.scrollWidth") <= width
    shapes = json.loads(
        browser.ask("""JSON.stringify([...document.querySelectorAll('figure')].map(f => {
        const box = f.querySelector('svg').getBoundingClientRect();
        return [f.dataset.plot, box.width, box.height, f.querySelectorAll('polyline, rect, circle').length] }))""")
    )
    assert {plot for plot, *_ in shapes} >= {"loss", "throughput", "time", "step", "memory", "network", "events"}
    assert all(wide > 200 and high > 20 and drawn for _, wide, high, drawn in shapes), shapes


@pytest.mark.parametrize("name", ["one", "two"])
@pytest.mark.parametrize("width", [380, 1200])
def test_its_letters_can_be_read(browser, report, name, width):
    browser.open(report / f"{name}.html", width=width)
    sizes = json.loads(
        browser.ask("""JSON.stringify([...document.querySelectorAll('main svg text')].map(t =>
        t.getBoundingClientRect().height))""")
    )
    assert min(sizes) >= 9
    assert browser.ask("""[...document.querySelectorAll('figure:not(:has(.wide)) svg')].every(s => {
        const box = s.getBoundingClientRect();
        return [...s.querySelectorAll('text')].every(t => {
            const b = t.getBoundingClientRect(); return b.left >= box.left - 1 && b.right <= box.right + 1 }) })""")


def test_dark_is_dark_and_light_is_light(browser, report):
    seen = {}
    for dark in (False, True):
        browser.open(report / "one.html", width=1200, dark=dark)
        back, ink = (browser.ask(f"getComputedStyle(document.body).{what}") for what in ("backgroundColor", "color"))
        seen[dark] = [sum(map(int, value[4:-1].split(","))) for value in (back, ink)]
    assert seen[False][0] > 600 > 200 > seen[False][1]
    assert seen[True][0] < 200 < 600 < seen[True][1]


def test_the_numbers_are_those_of_the_record(browser, report):
    browser.open(report / "one.html", width=1200)
    rounds = {line["round"]: line for line in lines(slow=1.5) if line["kind"] == "round"}
    for key in ("loss", "rate", "norm", "scale", "k", "sent"):
        shown = json.loads(
            browser.ask(f"""JSON.stringify([...document.querySelectorAll(
            '[data-plot="{key}"] table tr')].slice(1).map(r => [...r.cells].map(c => c.textContent)))""")
        )
        assert len(shown) >= 200
        for update, value in shown:
            assert float(value) == pytest.approx(float(rounds[int(update)][key]), abs=0, nan_ok=True)
    sent = browser.ask("""document.querySelectorAll('[data-plot="network"] ~ .scroll tr')[1].cells[2].textContent""")
    assert sent == "600,000"
    assert "1,234 parameters" in browser.ask("document.querySelector('.tiles').textContent")


def cells(browser, plot):
    """The table below a picture: by the name of each row, its cells."""
    rows = browser.ask(f"""JSON.stringify([...document.querySelectorAll('[data-plot="{plot}"] + .scroll tr')].map(r =>
        [...r.cells].map(c => c.textContent)))""")
    return {name: rest for name, *rest in json.loads(rows)}


@pytest.mark.parametrize("width", [380, 1200])
def test_several_runs_are_side_by_side_with_the_numbers_of_their_records(browser, report, width):
    browser.open(report / "two.html", width=width)
    for plot in ("time", "memory", "network"):
        assert browser.ask(f"""document.querySelectorAll('[data-plot="{plot}"]').length""") == 1
        assert cells(browser, plot)[""] == ["A: first", "B: second"]
        labels = json.loads(
            browser.ask(f"""JSON.stringify([...document.querySelectorAll('[data-plot="{plot}"] svg text')].map(t =>
            t.textContent))""")
        )
        assert {label[:2] for label in labels[::2]} == {"A ", "B "}, "every bar says whose it is"
    totals = [[line for line in lines(slow=slow) if line["kind"] == "rank"] for slow in (1.5, 1.0)]
    shown = cells(browser, "time")
    for key, name in (("data", "data"), ("forward_backward", "forward and backward"), ("update", "update")):
        per_update = [(t["time"][key] - t["first"][key]) / (t["rounds"] - 1) for run in totals for t in run]
        means = (per_update[0] + per_update[1]) / 2, (per_update[2] + per_update[3]) / 2
        assert shown[name] == [f"{1000 * mean:.3g} ms" for mean in means]
    assert shown["own work of the slowest rank"] == ["100 ms (rank 1)", "70 ms (rank 0)"]
    shown = cells(browser, "memory")
    assert shown["peak of a step, as predicted"] == ["3 MiB", "3 MiB"]
    assert shown["peak of the fullest rank"] == ["300 MiB (rank 0)"] * 2
    assert shown["rank 0: optimizer"] == ["2 MiB"] * 2
    shown = cells(browser, "network")
    assert shown["bytes of all ranks, in total"] == [f"{sum(t['sent'] for t in run):,}" for run in totals]
    assert shown["most of any rank, per update"] == ["1000 B"] * 2


def test_on_a_phone_the_names_of_rows_stay_in_sight(browser, report):
    browser.open(report / "two.html", width=380)
    left = browser.ask("""(() => { const box = document.querySelector('[data-plot="memory"] + .scroll');
        box.scrollLeft = 1000; return box.querySelectorAll('tr')[1].cells[0].getBoundingClientRect().left })()""")
    assert left >= 0


def test_what_a_record_says_runs_nothing(browser, report):
    browser.open(report / "one.html", width=1200)
    assert browser.ask("document.scripts.length") == 0
    assert EVIL in browser.ask("document.querySelector('dd').textContent")

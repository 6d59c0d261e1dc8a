"""Whatever a strategy is given, the outcome is a strategy or one StrategyError that fits on a screen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetx import DistributedStrategy, StrategyError
from fleetx.base.suggest import did_you_mean
from fleetx.strategy import _attributes
from fleetx.strategy.part import defaults_of, every

KEYS = {switch: list(defaults_of(part)) for switch, part in every().items() if defaults_of(part)}
SPECIAL = [2**31, 2**63, -(2**63) - 1, 10**4000, -1, 0, 1e308, float("inf"), float("nan"), 5e-324, "4GB", "bfloat16"]
scalars = st.none() | st.booleans() | st.integers() | st.sampled_from(SPECIAL) | st.floats() | st.text(max_size=8)
scalars |= st.binary(max_size=4) | st.dates()
names = st.sampled_from(sorted({key for keys in KEYS.values() for key in keys})) | st.text(max_size=5) | st.integers()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
BITS = ["amp", "lars_configs", ":", " ", "\n", "  ", "- ", "[", "]", "{", "}", ",", "&a", "*a", "!!int", "!!bool 7",
        "!!python/name:os.system", "'", '"', "|", "?", "#", "%", "---", "true", "1e-3", "~", "\t", "<<", "=", "\ufeff",
        "0x", "2001-13-01", "k_steps", "gradient_merge"]  # fmt: skip
texts = st.lists(st.sampled_from(BITS), max_size=12).map("".join).map(str.encode) | st.binary(max_size=20)


def use(make):
    """What the strategy is used for, or the error."""
    problems: list = []
    try:
        strategy = make()
        strategy.plan()
        return strategy if repr(strategy) and str(strategy) and dict(strategy.without_meaning()) is not None else None
    except StrategyError as error:
        problems = error.problems
    assert all(len(problem) < 3000 for problem in problems)
    return None


def test_any_switch_with_any_value_gives_a_strategy_or_its_error(examples):
    @settings(max_examples=examples)
    @given(st.dictionaries(st.sampled_from(sorted(_attributes())) | st.text(max_size=6), values, max_size=3))
    def holds(declared):
        use(lambda: DistributedStrategy(**declared))

    holds()


def test_any_setting_with_any_value_gives_a_strategy_or_its_error(examples):
    @settings(max_examples=examples)
    @given(st.sampled_from(sorted(KEYS)).flatmap(lambda s: st.tuples(st.just(s), settings_of(s))))
    def holds(case):
        switch, given_settings = case
        flat = every()[switch].flat
        declared = {n: given_settings[f] for n, f in flat.items() if f in given_settings} or {switch: given_settings}
        use(lambda: DistributedStrategy(**declared))

    holds()


def settings_of(switch):
    return st.dictionaries(st.sampled_from(KEYS[switch]), values, max_size=3)


def test_any_text_gives_a_strategy_that_survives_yaml_or_its_error(tmp_path, examples):
    path = tmp_path / "s.yaml"

    @settings(max_examples=examples)
    @given(texts)
    def holds(text):
        path.write_bytes(text)
        if strategy := use(lambda: DistributedStrategy.load(path)):
            strategy.save(path)
            assert DistributedStrategy.load(path) == strategy

    holds()


def bomb():
    nested = "&a0 [l, l, l, l, l, l, l, l, l]"
    for depth in range(1, 12):
        nested = f"&a{depth} [{nested}, {', '.join([f'*a{depth - 1}'] * 8)}]"
    return nested


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"amp: {bomb()}", r"the alias \*a0 is not supported: write the value out"),
        ("amp_configs: &a {dtype: *a}", r"the alias \*a is not supported"),
        ("amp:\ttrue\n\tlars: true", r"line 1, column 5: .*found character .*cannot start any token"),
        ("amp: é".encode("latin-1"), "byte 6 is not UTF-8: save the file as UTF-8"),
        ("amp: true".encode("utf-16"), "byte 1 is not UTF-8"),
        ("amp: 2001-13-45", "a value cannot be read: month must be in 1..12"),
        ("amp: !!timestamp x", "a value cannot be read"),
        ("amp: " + "1" * 5000, "a value cannot be read"),
        ("amp: 0x" + "f" * 5000, "amp = an integer of 20000 bits: must be True or False"),
        ("[" * 100_000, "nested too deeply for settings"),
        ("a: {" * 1000, "nested too deeply for settings"),
        ("amp: " + "x" * 100_000, r"amp = 'x+\.\.\.x+': must be True or False"),
        ("amp: no\namp_configs: {dtype: no}", r"amp_configs\['dtype'\] = False: must be 'float16' or 'bfloat16'"),
        ("gradient_merge: {k_steps: .nan}", r"k_steps'\] = nan: must be an integer"),
        ("amp: true\n---\namp: false", "expected a single document"),
    ],
    ids=lambda v: str(v)[:30],
)  # fmt: skip
def test_bad_yaml_is_refused_in_a_short_message(tmp_path, text, sentence):
    path = tmp_path / "s.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StrategyError, match=sentence) as error:
        DistributedStrategy.load(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("given", "known", "hint"),
    [("am", ["amp"], "did you mean 'amp'?"), ("lr", ["lars"], ""), ("a", ["amp", "batch"], ""), (3, ["k_steps"], "")],
)
def test_a_hint_for_one_or_two_characters_must_be_close(given, known, hint):
    assert did_you_mean(given, known, cutoff=0.4) == hint


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_bytes(b"\xef\xbb\xbfamp: true\n")
    assert DistributedStrategy.load(path).amp


def test_a_file_of_100_mb_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "s.yaml"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(StrategyError, match="is longer than 256 KiB"):
        DistributedStrategy.load(path)


def test_a_value_that_python_cannot_print_is_described():
    with pytest.raises(StrategyError, match="amp = an integer of 16610 bits"):
        DistributedStrategy(amp=10**5000)
    loop: list = []
    loop.append(loop)
    with pytest.raises(StrategyError, match=r"amp = \[+\.\.\.\]+: must be"):
        DistributedStrategy(amp=loop)

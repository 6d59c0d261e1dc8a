"""Which strategies keep the graph of a compiled model whole: docs/results/compile.md is this table."""

from __future__ import annotations

import pytest
from compiled_graphs import PAGE, ROWS, graphs, page


@pytest.mark.parametrize("name", ROWS)
def test_a_compiled_model_trains_the_same_in_as_many_graphs_as_the_page_says(name, ranks):
    row = ROWS[name]
    assert ranks.run(graphs, row.declared) == [([row.graphs] * 2, True)] * 2


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python tests/engine/compiled_graphs.py"

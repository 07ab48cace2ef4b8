"""The counts of docs/tables.md are those of the tables, and of all printed values that a table shows."""

from __future__ import annotations

from docs import make_reproduced as made
from dpgen_bench.tables.published import published_rows


def test_the_page_is_made_from_the_tables() -> None:
    """After a new record: `make tables`."""
    assert made.PAGE.read_text() == made.page()


def test_every_printed_value_is_counted_once() -> None:
    """The table of Table 4 of "Private GANs, Revisited" leaves the ratios of parameters out."""
    for name, spec in made.papers().items():
        printed = sum(
            cell.value is not None
            for row in published_rows(str(spec.paper), str(spec.published))
            for metric, cell in row.cells.items()
            if not spec.metrics or metric in spec.metrics
        )
        found = made.counts(name)
        assert found["printed"] == printed
        assert sum(found[kind] for kind in ("as in the paper", "otherwise", "reduced", "not measured")) == printed


def test_counts_of_a_table_are_those_of_its_sentence() -> None:
    for name in made.papers():
        found = made.counts(name)
        text = (made.ROOT / "results" / "tables" / f"{name}.md").read_text()
        if found["not measured"] == found["printed"]:
            assert f"Of {found['printed']} published values, none was measured." in text
        else:
            as_in, other, reduced = found["as in the paper"], found["otherwise"], found["reduced"]
            by_reduced = (
                f"{reduced} by reduced runs ({found['reduced, near']} within the tolerance), " if reduced else ""
            )
            assert (
                f"published values, {as_in} were measured at the paper's scale and by its protocol "
                f"({found['as in the paper, near']} within the tolerance), {other} in another way "
                f"({found['otherwise, near']} within the tolerance; a note says how), {by_reduced}and "
                f"{found['not measured']} were"
            ) in text

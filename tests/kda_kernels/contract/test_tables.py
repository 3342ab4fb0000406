"""The documentation tables: every argument has its line, every line its columns."""

import re

from kda_kernels.contract.render import operators_page, section
from kda_kernels.plan import CONTRACTS


def rows(text):
    """Table rows as lists of cells; an escaped bar is part of a cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]


def test_every_argument_symbol_and_the_output_have_a_line():
    for contract in CONTRACTS:
        first = [row[0] for row in rows(section(contract))]
        for argument in contract.arguments:
            assert sum(f"`{argument.name}`" in cell for cell in first) == 1, argument.name
        assert sum("`output`" in cell for cell in first) == 1
        for symbol in contract.dims:
            assert f" {symbol} " in first


def test_every_line_of_a_table_has_as_many_cells_as_its_head():
    for contract in CONTRACTS:
        for table in section(contract).split("\n\n"):
            assert len({len(row) for row in rows(table)}) <= 1


def test_tables_say_what_is_written_what_may_be_none_and_every_rule():
    for contract in CONTRACTS:
        text = section(contract)
        assert "| `state` (updated in place) |" in text
        for argument in contract.scalars:
            assert argument.doc in text
            line = next(
                line for line in text.splitlines() if line.startswith(f"| `{argument.name}`")
            )
            assert f"| {argument.default} |" in line
        assert f"kda_ops.{contract.public_name}" in text


def test_the_page_holds_every_section():
    page = operators_page()
    assert all(section(contract) in page for contract in CONTRACTS)

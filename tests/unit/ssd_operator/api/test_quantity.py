from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_operator.api.fields import parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"),
        ("2", "2"),
        (2, "2"),
        (-1, "-1"),
        ("-1n", "-0.000000001"),
        ("0.8", "0.8"),
        (".5", "0.5"),
        ("1.", "1"),
        ("2Gi", "2147483648"),
        ("1500k", "1500000"),
        ("12e6", "12000000"),
        ("1E3", "1000"),
        ("1E", "1000000000000000000"),
        ("100u", "0.0001"),
    ],
)
def test_a_quantity_is_a_number(text: str | int, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "Gi", "2gi", "1e3m", "1 Gi", "two", "0x10", "1K", "-", "--1"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@given(st.integers(1, 1 << 20))
def test_one_amount_has_several_spellings(number: int) -> None:
    assert parse_quantity(f"{number * 1024}Mi") == parse_quantity(f"{number}Gi")
    assert parse_quantity(f"{number * 1000}m") == parse_quantity(number)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1n", "0.001"), ("2.0005", "2.001"), ("2.5", "2.5"), ("2Gi", "2147483648")],
)
def test_a_server_keeps_whole_thousandths_of_a_request(text: str, number: str) -> None:
    assert parse_quantity(text, is_rounded=True) == Decimal(number)

"""Kubernetes quantities as numbers: ``500m`` is 0.5, ``2Gi`` is 2147483648."""

import re
from decimal import ROUND_CEILING, Decimal

_FORM = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:[eE]([+-]?\d{1,3})|([KMGTPE]i|[numkMGTPE]))?")
_SUFFIXES = (
    {"": Decimal(1)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("num", start=-3)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)}
    | {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)}
)

_MILLI = Decimal("0.001")


def parse_quantity(text: str | int | float) -> Decimal:
    """Return the number that a quantity means.

    Raises:
        ValueError: it is not a quantity.
    """
    match = _FORM.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 2Gi")
    number, exponent, suffix = match.groups()
    return Decimal(number) * Decimal(10) ** int(exponent or 0) * _SUFFIXES[suffix or ""]


def parse_rounded(text: str | int | float) -> Decimal:
    """Return the number that an API server makes of a request or limit: whole thousandths, up.

    Raises:
        ValueError: it is not a quantity.
    """
    thousandths = parse_quantity(text) / _MILLI
    return thousandths.to_integral_value(ROUND_CEILING) * _MILLI

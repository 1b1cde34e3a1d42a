"""The embedded pair: a trained target and draft that complete Python, contained in the package.

The package contains the weights. ``widen`` makes a more expensive model of the same function, and
``corpus`` supplies the held-out prompts of the benchmarks. The engine receives folders, never
``demo://`` names. ``tools/distill`` trains the pair.
"""

from pathlib import Path

from ssd.errors import ModelNotFoundError

SCHEME = "demo://"
NAMES = ("target", "draft")
FACTORS = (1, 2, 4, 8)


def is_demo(name: str) -> bool:
    """Return whether a model name selects the embedded pair (``demo://...``)."""
    return name.startswith(SCHEME)


def folder(name: str) -> Path:
    """Return the packaged folder of a model of the pair, without file access.

    Args:
        name: ``target``, ``draft``, ``demo://target`` or ``demo://draft``. A query
            (``demo://target?widen=4``) does not change the folder; ``widening`` reads it.

    Returns:
        A folder in Hugging Face's layout, with its tokenizer.

    Raises:
        ModelNotFoundError: the pair has no such model, or the query is not valid.
    """
    return Path(__file__).parent / "weights" / _parse(name)[0]


def widening(name: str) -> int:
    """Return the factor of ``demo://NAME?widen=FACTOR``, 1 without a query.

    Raises:
        ModelNotFoundError: as ``folder``.
    """
    return _parse(name)[1]


def _parse(name: str) -> tuple[str, int]:
    """Split a name into the model and the factor to widen it by."""
    model, mark, query = name.removeprefix(SCHEME).partition("?")
    if model not in NAMES:
        choices = ", ".join(SCHEME + choice for choice in NAMES)
        raise ModelNotFoundError(f"{name!r} is not in the embedded pair; choose one of {choices}")
    if not mark:
        return model, 1
    key, _, number = query.partition("=")
    if key != "widen" or number not in {str(factor) for factor in FACTORS}:
        allowed = ", ".join(str(factor) for factor in FACTORS)
        raise ModelNotFoundError(
            f"{name!r}: {query!r} is not valid; write ?widen=FACTOR with a factor of {allowed}"
        )
    return model, int(number)

"""The embedded pair: a target and a draft that travel inside the package and complete Python.

Here belong the packaged weights, the command that trains them (``ssd.demo.train``), the one that
judges them (``ssd.demo.evaluate``) and the one that makes a costlier model of the same function
(``ssd.demo.widen``). The small differentiable model of ``ssd.demo.model`` serves training only: to
run the pair is the engine's work, and the engine knows folders, not ``demo://`` names.
"""

from pathlib import Path

from ssd.errors import ModelNotFoundError

SCHEME = "demo://"
NAMES = ("target", "draft")
FACTORS = (1, 2, 4, 8)


def is_demo(name: str) -> bool:
    """Say whether a model's name asks for the embedded pair (``demo://...``)."""
    return name.startswith(SCHEME)


def folder(name: str) -> Path:
    """Return the packaged folder of a model of the pair; touches no file.

    Args:
        name: ``target``, ``draft``, ``demo://target`` or ``demo://draft``. A wish to widen
            (``demo://target?widen=4``) is accepted and changes nothing here: ``widening`` reads
            it, and ``ssd.demo.widen.widen`` makes the wider folder.

    Returns:
        A folder in Hugging Face's layout, with its tokenizer.

    Raises:
        ModelNotFoundError: There is no such model in the pair, or the wish cannot be read.
    """
    return Path(__file__).parent / "weights" / _parse(name)[0]


def widening(name: str) -> int:
    """Return the factor that ``demo://NAME?widen=FACTOR`` asks for, 1 if it asks for none.

    Raises:
        ModelNotFoundError: As ``folder``.
    """
    return _parse(name)[1]


def _parse(name: str) -> tuple[str, int]:
    """Split a name into the model and the factor to widen it by."""
    model, mark, wish = name.removeprefix(SCHEME).partition("?")
    if model not in NAMES:
        known = ", ".join(SCHEME + known for known in NAMES)
        raise ModelNotFoundError(f"{name!r} is not in the embedded pair; choose one of {known}")
    if not mark:
        return model, 1
    key, _, number = wish.partition("=")
    if key != "widen" or number not in {str(factor) for factor in FACTORS}:
        allowed = ", ".join(str(factor) for factor in FACTORS)
        raise ModelNotFoundError(
            f"{name!r}: {wish!r} is not understood; write ?widen=FACTOR with a factor of {allowed}"
        )
    return model, int(number)

"""Any value of a dataclass, within the numbers that its message can have."""

from typing import Any, get_type_hints

from hypothesis import strategies as st

VALUES: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(0, 2**31 - 1),
    float: st.floats(0.0, 1.0),
    str: st.text(max_size=5),
}


def any_of(kind: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a dataclass; those of some fields are ``given``."""
    found = {
        name: VALUES[hint] if hint in VALUES else st.from_type(hint)
        for name, hint in get_type_hints(kind).items()
        if name not in given
    }
    return st.builds(kind, **found, **given)


def tuples_of(each: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(each, max_size=3).map(tuple)

"""The sessions of sequences and links, in any order of additions and removals."""

from hypothesis import given
from hypothesis import strategies as st

from ssd.pool.link import DraftLink
from ssd.pool.session_registry import SessionRegistry
from ssd.pool.table_deadline import opening_seconds
from ssd.types import Welcome


def link(name: str = "draft") -> DraftLink:
    welcome = Welcome(epoch=1, max_sessions=8, lookahead=3, branches=2)
    return DraftLink(name, welcome, lambda _message: None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "end", "lose"]), st.integers(0, 4), st.sampled_from(["a", "b"])
    ),
    max_size=30,
)


@given(STEPS)
def test_each_session_is_registered_for_its_sequence_and_its_link(
    steps: list[tuple[str, int, str]],
) -> None:
    registry, links = SessionRegistry(), {name: link(name) for name in ("a", "b")}
    numbers = set()
    for action, sequence_id, name in steps:
        match action:
            case "add" if sequence_id not in registry:
                session = registry.add(links[name], sequence_id, 5, 0.0, 9)
                assert (name, session.number) not in numbers, "a number is never used twice"
                numbers.add((name, session.number))
            case "end":
                registry.end_sequence(sequence_id)
            case "lose":
                registry.remove(list(links[name].sessions.values()))
        on_links = [each for one in links.values() for each in one.sessions.values()]
        assert len(on_links) == len(registry)
        assert all(registry.find(each.sequence_id) is each for each in on_links)
        assert all(each.link.sessions[each.number] is each for each in on_links)


def test_an_opening_has_time_for_the_prompts_before_it() -> None:
    registry, draft = SessionRegistry(), link()
    first, second = registry.add(draft, 1, 100, 7.0, 200), registry.add(draft, 2, 50, 7.0, 200)
    assert first.open_by == 7.0 + opening_seconds(100)
    assert second.open_by == 7.0 + opening_seconds(150)
    first.is_open = True
    assert registry.add(draft, 3, 10, 7.0, 200).open_by == 7.0 + opening_seconds(60)


def test_exclusions_end_with_their_sequence() -> None:
    registry, draft = SessionRegistry(), link()
    registry.exclude(1, draft)
    assert draft in registry.excluded_links(1)
    assert not registry.excluded_links(2)
    registry.end_sequence(1)
    assert not registry.excluded_links(1)

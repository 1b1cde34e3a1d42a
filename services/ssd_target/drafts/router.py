"""Which link gets the next session. Pure."""

from collections.abc import Collection, Iterable

from ssd_target.drafts.link import DraftLink, LinkState


def choose_link(
    links: Iterable[DraftLink], excluded: Collection[DraftLink], num_tokens: int, now: float
) -> DraftLink | None:
    """Return the link with the smallest share of its sessions in use; None if none has room.

    Args:
        links: all links that are up.
        excluded: links that cannot serve the sequence.
        num_tokens: committed tokens of the sequence.
        now: time on the clock of the links.
    """
    return min(
        (each for each in links if each not in excluded and has_room(each, num_tokens, now)),
        key=lambda link: len(link.sessions) / link.max_sessions,
        default=None,
    )


def has_room(link: DraftLink, num_tokens: int, now: float) -> bool:
    """Whether a link can open one more session, of so many tokens."""
    return (
        link.state(now) is LinkState.ACTIVE
        and (not link.max_len or num_tokens < link.max_len)
        and len(link.sessions) < link.max_sessions
        and now >= link.no_openings_before
    )

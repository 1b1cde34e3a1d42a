"""The drafts of a target: their links and sessions, and the lookup of outcomes in their tables.

``dialer`` opens links, ``pool.DraftPool`` uses them in rounds, ``rounds`` has the values of its
interface. It does not depend on the target's model and imports no engine, so any target can use it.
"""

__all__ = [
    "dialer",
    "handshake",
    "link_thread",
    "metrics",
    "pool",
    "round_log",
    "rounds",
    "settings",
    "status",
    "sustainable_sessions",
]

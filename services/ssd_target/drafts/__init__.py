"""The drafts of a target: their links and sessions, their tables, and their status.

``dialer`` opens links, ``pool`` uses them in rounds, ``status`` reports them. The round itself
belongs to ``ssd_target.decoding``, whose values this package uses.
"""

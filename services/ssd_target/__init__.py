"""The target process: it receives requests and runs rounds.

``decoding`` owns the round. ``serving`` (requests, streams) and ``drafts`` (pool, links) use its
values and do not import each other. ``target`` connects the three. Model code runs on the step
thread only, everything else on the asyncio loop. Algorithms of speculation belong to
``ssd.speculation``, tensor code of models to ``ssd.engine``.
"""

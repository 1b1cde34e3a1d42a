"""The target process: requests, the round, the pool of drafts, streams.

What decides is pure (``scheduler``, ``sequence``, ``patience``, ``tally``); what runs is thin
(``decode_loop`` on the step thread; ``servicer``, ``links`` and ``streams`` on the asyncio loop).
Model code runs on the step thread only. No algorithm of speculation and no tensor code of a model
belongs here: see ``ssd.speculation`` and ``ssd.engine``.
"""

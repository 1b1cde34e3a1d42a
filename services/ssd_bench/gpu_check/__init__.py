"""``make gpu-check``: whether this product is correct on a GPU, and how fast it is there.

A check is a function of an ``Environment`` that returns an ``Outcome``. Each runs in a process of
its own with a time limit, so that a crash or a hang ends one check only. ``--on cpu`` runs the same
checks with small models.
"""

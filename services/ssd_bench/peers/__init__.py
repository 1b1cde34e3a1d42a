"""``ssd bench peers``: this product beside other engines, with the same weights, prompts and CPUs.

Each peer runs in its own environment, as a process that executes one file of ``workers`` with the
interpreter of that environment, or is a server that runs already. All contenders stay loaded and
measure in turn.
"""

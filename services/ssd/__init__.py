"""The library of SSD, used by the target, the draft, the command, the benchmark and the operator.

It contains a model on a device (``engine``), speculation as pure functions (``speculation``), rows
of numbers between processes (``transport``), messages and errors (``rpc``), text (``text``) and
the embedded model pair (``demo``). The processes are the packages ``ssd_*``.
"""

__version__ = "0.1.0"

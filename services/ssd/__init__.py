"""SSD's library: what the target, the draft, the gateway, the command and the operator stand on.

A model on a device (``engine``), speculation as pure functions (``speculation``), rows of numbers
between processes (``transport``), messages and errors on the wire (``rpc``), text (``text``), and
the embedded model pair (``demo``). Nothing here is a process and nothing here reads a command line.
"""

__version__ = "0.1.0"

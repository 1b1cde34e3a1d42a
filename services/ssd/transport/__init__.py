"""Collective channels, an option: NCCL or gloo carries commits and tables beside a link's stream.

``setup`` connects the two ends of a link, ``channel`` carries frames, and ``communicator`` has the
interface of the backends. A link without this option imports nothing here.
"""

__all__ = ["communicator", "setup"]

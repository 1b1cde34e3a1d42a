"""Moves rows of int32 between a target and a draft, without interpreting them.

This package holds the frame format, its limits, and the channels that carry frames.
``ssd.speculation.table`` defines the meaning of rows, ``ssd.rpc.link`` the control messages.
"""

"""Moves rows of numbers between a target and a draft; never knows what they mean.

Here belong the frame format, its limits, and the channels that carry frames. What a row says is
the business of ``ssd.speculation.table``; control messages are the business of ``ssd.rpc.link``.
"""

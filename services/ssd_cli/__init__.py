"""The ``ssd`` command: starts the processes on this machine, or calls running ones.

This package contains the flags and the output for terminals and machines. It contains no code of
the product: the command is a gRPC client and never imports torch.
"""

"""The ``ssd`` command: starts the processes on this machine, or talks to running ones.

Belongs here: flags, what a person sees, what a machine reads. Does not: anything of the product
itself; the command speaks gRPC like any client and never imports torch.
"""

"""gRPC: servers, clients, links, codecs between messages and dataclasses, errors as statuses.

All code that uses ``ssd.v1`` or gRPC is here, except the servicers of the processes. Frames are
bytes here; this package contains no tensors.
"""

from ssd.settings import quiet_grpc

quiet_grpc()

"""The wire: messages to dataclasses and back, servers, clients, links, errors as statuses.

Everything that touches ``ssd.v1`` or gRPC, apart from the servicers of the processes, is here.
No tensors: frames pass through as bytes.
"""

from ssd.settings import quiet_grpc

quiet_grpc()

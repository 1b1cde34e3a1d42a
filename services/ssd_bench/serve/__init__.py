"""``ssd bench serve``: load on a target over gRPC, and what its clients measure."""

"""Passes on CPUs as OpenVINO graphs. Only ``execution`` imports this package, by name."""

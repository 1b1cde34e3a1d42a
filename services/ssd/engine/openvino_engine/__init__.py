"""Passes on CPUs as OpenVINO graphs. Only ``execution`` imports this package, by name."""

import sys

# The import of OpenVINO sends a report to an analytics service on the internet, and keeps an id and
# a counter in the home folder. Without this package, OpenVINO does neither.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]

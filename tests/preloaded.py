"""Imported by the fork server of ``tests.processes``, once for all its processes.

The engines are imported by name when a model is loaded, so the processes alone do not import them.
"""

import gc
from importlib import import_module

for name in (
    "ssd_target.target",
    "ssd_draft.draft",
    "ssd_gateway.gateway",
    "ssd.model_files.model_source",
    "ssd.engine.torch_execution",
    "ssd.engine.openvino_engine.load",
    "ssd.engine.models.decoder",
):
    import_module(name)
# The processes neither copy nor examine these objects.
gc.collect()
gc.freeze()

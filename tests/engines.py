"""The engines of a CPU, for tests that run on each of them."""

from dataclasses import replace
from typing import Any

from ssd.engine.config import EngineConfig
from ssd.engine.runner import ModelRunner

CPU_ENGINES = ("torch", "openvino", "static")


def on(name: str, engine: EngineConfig) -> EngineConfig:
    """The same settings for one of ``CPU_ENGINES``."""
    if name == "openvino":
        return replace(engine, engine="openvino", block_size=32)
    if name == "static":
        return replace(engine, engine="static")
    return engine


def inside(runner: ModelRunner) -> Any:
    """The execution of a runner, whose model and entries a test reads."""
    return runner.execution

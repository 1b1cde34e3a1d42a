"""``python -m ssd_target``: read settings, find the model, construct the target, run it."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.errors import SettingsError, SetupError
from ssd.model_source import resolve
from ssd.ports import Tokenizer
from ssd.settings import load
from ssd.telemetry import SystemClock, configure_logging, get_logger, log_crash
from ssd.text.tokenizer import load_tokenizer
from ssd_target.settings import TargetSettings
from ssd_target.target import Target

_log = get_logger("ssd_target")
LONGEST_DEFAULT_LEN = 4096
"""Tokens of a sequence where the model allows more and the settings say nothing."""
SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the other one has a frame to send."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; the result is its exit code."""
    try:
        settings = load(TargetSettings, sys.argv[1:] if argv is None else argv, prefix="SSD_TARGET")
    except SettingsError as error:
        configure_logging("json", "target")
        _log.error("failed", error=type(error).__name__, message=str(error))
        return 2
    configure_logging(settings.settings.log_format, "target")
    threading.excepthook = log_crash
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        return asyncio.run(serve(settings.settings))
    except SetupError as error:
        _log.error("failed", error=type(error).__name__, message=str(error))
        return 2 if isinstance(error, SettingsError) else 1


async def serve(settings: TargetSettings) -> int:
    """Construct everything and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    if settings.other_cpus:
        os.sched_setaffinity(0, settings.other_cpus)
    folder = resolve(settings.model)
    tokenizer = load_tokenizer(folder)
    engine = engine_config(settings, ModelConfig.from_folder(folder), tokenizer)
    target = Target(settings, engine, folder, tokenizer, SystemClock())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, target.leave)
    code = await target.run()
    _log.info("stopped", code=code)
    return code


def engine_config(
    settings: TargetSettings, model: ModelConfig, tokenizer: Tokenizer
) -> EngineConfig:
    """The engine's share of the settings.

    Raises:
        SettingsError: a length beyond what the model was made for.
    """
    longest = model.max_position_embeddings
    if settings.max_model_len > longest:
        raise SettingsError(
            f"max_model_len {settings.max_model_len} is over the model's own {longest}; lower it"
        )
    return EngineConfig(
        device=settings.device,
        dtype=settings.dtype,
        attention=settings.attention,
        max_model_len=settings.max_model_len or min(longest, LONGEST_DEFAULT_LEN),
        max_num_seqs=settings.max_num_seqs,
        num_columns=settings.num_columns,
        prefill_chunk=settings.prefill_chunk,
        kv_cache_bytes=settings.kv_cache_bytes or None,
        deterministic=settings.deterministic,
        num_token_ids=tokenizer.vocab_size,
    )


if __name__ == "__main__":
    sys.exit(main())

"""``python -m ssd_draft``: read settings, find the model, construct the draft, run it."""

import asyncio
import os
import signal
import socket
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
from ssd.types import LinkPolicy, Peer
from ssd_draft.draft import Draft
from ssd_draft.links import LinkTerms
from ssd_draft.settings import DraftSettings
from ssd_draft.step_thread import StepSettings

_log = get_logger("ssd_draft")
LONGEST_DEFAULT_LEN = 4096
"""Tokens of a session where the model allows more and the settings say nothing."""
SWITCH_SECONDS = 0.0005
"""How long a thread may hold the interpreter while the other one has a frame to send."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; the result is its exit code."""
    try:
        loaded = load(DraftSettings, sys.argv[1:] if argv is None else argv, prefix="SSD_DRAFT")
    except SettingsError as error:
        configure_logging("json", "draft")
        return _fail(error)
    configure_logging(loaded.settings.log_format, "draft")
    threading.excepthook = log_crash
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        return asyncio.run(serve(loaded.settings))
    except SetupError as error:
        return _fail(error)


async def serve(settings: DraftSettings) -> int:
    """Construct everything and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    every_cpu = os.sched_getaffinity(0)
    pin(settings, every_cpu)
    folder = resolve(settings.model)
    tokenizer = load_tokenizer(folder)
    step = StepSettings(
        folder=folder,
        engine=engine_config(settings, ModelConfig.from_folder(folder), tokenizer),
        num_reserved_positions=settings.num_reserved_positions,
        num_threads=settings.threads,
        cpus=settings.step_cpus or frozenset(every_cpu),
    )
    draft = Draft(settings, step, link_terms(settings, tokenizer), SystemClock())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, draft.leave)
    code = await draft.run()
    _log.info("stopped", code=code)
    return code


def pin(settings: DraftSettings, allowed: set[int]) -> None:
    """Put this thread, and those it will start, on their CPUs; the step thread goes to its own.

    Raises:
        SettingsError: a CPU that this process may not use.
    """
    missing = (settings.step_cpus | settings.other_cpus) - allowed
    if missing:
        raise SettingsError(f"CPUs {sorted(missing)} are not among the allowed {sorted(allowed)}")
    if settings.other_cpus:
        os.sched_setaffinity(0, settings.other_cpus)


def engine_config(
    settings: DraftSettings, model: ModelConfig, tokenizer: Tokenizer
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
        max_num_seqs=settings.max_sessions,
        num_columns=settings.num_columns,
        prefill_chunk=settings.prefill_chunk,
        kv_cache_bytes=settings.kv_cache_bytes or None,
        deterministic=settings.deterministic,
        num_token_ids=tokenizer.vocab_size,
        branches=settings.branches,
    )


def link_terms(settings: DraftSettings, tokenizer: Tokenizer) -> LinkTerms:
    """What every target is held to."""
    return LinkTerms(
        vocab_size=tokenizer.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        lookahead=settings.lookahead,
        branches=settings.branches,
        capacity=settings.max_sessions,
        delay_seconds=settings.inject_delay_ms / 1000,
        default_policy=LinkPolicy(fan_out_policy=settings.fan_out),
        peer=Peer(pod=f"{socket.gethostname()}:{os.getpid()}"),
    )


def _fail(error: SetupError) -> int:
    _log.error("failed", error=type(error).__name__, message=str(error))
    return 2 if isinstance(error, SettingsError) else 1


if __name__ == "__main__":
    sys.exit(main())

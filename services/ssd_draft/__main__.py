"""``python -m ssd_draft``: read settings, find the model, construct the draft, run it."""

from ssd.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Here, because what is imported below takes seconds.
    end_at_sigterm()

import sys
from collections.abc import Sequence

from ssd.cpu_plan import pin
from ssd.engine.check import check_engine
from ssd.engine.config import EngineConfig, ModelConfig, length_limit, usable_token_ids
from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.engine.precision import choose_precision
from ssd.model_source import local_folder, resolve
from ssd.ports import Tokenizer
from ssd.process import peer, run_process, run_until_signal
from ssd.telemetry import SystemClock
from ssd.text.tokenizer import load_tokenizer
from ssd.types import LinkPolicy, Peer
from ssd_draft.draft import Draft
from ssd_draft.links import LinkTerms
from ssd_draft.settings import DraftSettings
from ssd_draft.step_thread import StepSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process; the result is its exit code."""
    return run_process("draft", DraftSettings, serve, check, argv)


async def serve(settings: DraftSettings) -> int:
    """Construct everything and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    cpus = pin(settings.step_cpus, settings.other_cpus)
    folder = resolve(settings.model)
    tokenizer = load_tokenizer(folder)
    step = StepSettings(
        folder=folder,
        engine=engine_config(settings, ModelConfig.from_folder(folder), tokenizer),
        num_reserved_positions=settings.num_reserved_positions,
        num_threads=settings.threads,
        cpus=cpus,
    )
    me = peer(settings, weights_fingerprint(folder))
    terms = link_terms(settings, tokenizer, step.engine, me)
    draft = Draft(settings, step, terms, SystemClock())
    return await run_until_signal(draft.run(), draft.drain)


def check(settings: DraftSettings) -> None:
    """Find out what can be known without the weights; a model on the hub is not looked for.

    Raises:
        SetupError: the process could not start.
    """
    if (folder := local_folder(settings.model)) is not None:
        model = ModelConfig.from_folder(folder)
        check_engine(model, engine_config(settings, model, load_tokenizer(folder)))


def engine_config(
    settings: DraftSettings, model: ModelConfig, tokenizer: Tokenizer
) -> EngineConfig:
    """The engine's share of the settings.

    Raises:
        SettingsError: a length beyond what the model was made for.
    """
    precision = choose_precision(settings.dtype, settings.device)
    return EngineConfig(
        device=settings.device,
        dtype=precision.dtype,
        dtype_reason=precision.reason,
        attention=settings.attention,
        max_model_len=length_limit(settings.max_model_len, model),
        max_num_seqs=settings.max_sessions,
        num_columns=settings.num_columns,
        prefill_chunk=settings.prefill_chunk,
        kv_cache_bytes=settings.kv_cache_bytes or None,
        deterministic=settings.deterministic,
        num_token_ids=usable_token_ids(tokenizer.vocab_size, model),
        branches=settings.branches,
    )


def link_terms(
    settings: DraftSettings, tokenizer: Tokenizer, engine: EngineConfig, me: Peer
) -> LinkTerms:
    """What every target is held to."""
    return LinkTerms(
        vocab_size=engine.num_token_ids or tokenizer.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        lookahead=settings.lookahead,
        branches=settings.branches,
        capacity=settings.max_sessions,
        max_len=engine.max_model_len,
        delay_seconds=settings.inject_delay_ms / 1000,
        default_policy=LinkPolicy(fan_out_policy=settings.fan_out),
        peer=me,
    )


if __name__ == "__main__":
    sys.exit(main())

"""``python -m ssd_target``: read settings, find the model, construct the target, run it."""

from ssd.sigterm import end_at_sigterm

if __name__ == "__main__":
    # Before the imports below, which take seconds.
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
from ssd_target.model import LocalModel
from ssd_target.settings import TargetSettings
from ssd_target.target import Target


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    return run_process("target", TargetSettings, serve, check, argv)


async def serve(settings: TargetSettings) -> int:
    """Construct the target and serve until a signal.

    Raises:
        SetupError: the process cannot start.
    """
    cpus = pin(settings.step_cpus, settings.other_cpus)
    folder = resolve(settings.model)
    tokenizer = load_tokenizer(folder)
    engine = engine_config(settings, ModelConfig.from_folder(folder), tokenizer)
    model = LocalModel(folder=folder, tokenizer=tokenizer, engine=engine)
    me = peer(settings, weights_fingerprint(folder))
    target = Target(settings, model, me, cpus, SystemClock())
    return await run_until_signal(target.run(), target.drain)


def check(settings: TargetSettings) -> None:
    """Check all that can be checked without the weights. A model on the hub is not looked up.

    Raises:
        SetupError: the process would not start.
    """
    if (folder := local_folder(settings.model)) is not None:
        model = ModelConfig.from_folder(folder)
        check_engine(model, engine_config(settings, model, load_tokenizer(folder)))


def engine_config(
    settings: TargetSettings, model: ModelConfig, tokenizer: Tokenizer
) -> EngineConfig:
    """Return the configuration of the engine.

    Raises:
        SettingsError: ``max_model_len`` is over the maximum of the model.
    """
    precision = choose_precision(settings.dtype, settings.device)
    return EngineConfig(
        device=settings.device,
        dtype=precision.dtype,
        dtype_reason=precision.reason,
        attention=settings.attention,
        max_model_len=length_limit(settings.max_model_len, model),
        max_num_seqs=settings.max_num_seqs,
        num_columns=settings.num_columns,
        prefill_chunk=settings.prefill_chunk,
        kv_cache_bytes=settings.kv_cache_bytes or None,
        deterministic=settings.deterministic,
        num_token_ids=usable_token_ids(tokenizer.vocab_size, model),
    )


if __name__ == "__main__":
    sys.exit(main())

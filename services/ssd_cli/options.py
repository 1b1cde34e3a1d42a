"""Flags that several commands have."""

from typing import Annotated, Literal

import typer

from ssd.errors import SettingsError
from ssd.rpc.credentials import ClientCredentials, TlsFiles

MAX_TOKENS = 1 << 20
"""More than the maximum length of any model."""

OF_A_DEPLOYMENT = (
    *("target", "draft", "lookahead", "branches", "num_drafts", "dtype", "engine"),
    *("device", "draft_device"),
    *("weights", "draft_weights"),
    "tensor_parallel_size",
)
"""Parameters of the processes to start. A running target has its own."""
OF_A_RUNNING_TARGET = {
    "wait_seconds": "--wait",
    "tls_ca": "--tls-ca",
    "tls_certificate": "--tls-certificate",
    "tls_key": "--tls-key",
    "token_file": "--token-file",
    "allow_insecure": "--allow-insecure",
}
"""Parameters of a call, with their flags."""

Target = Annotated[str, typer.Option("--target", help="Model folder, demo://target or hf://…")]
Draft = Annotated[str, typer.Option("--draft", help="Model folder, demo://draft or hf://…")]
NumDrafts = Annotated[
    int, typer.Option("--num-drafts", min=0, max=64, help="Number of draft processes.")
]
Lookahead = Annotated[
    int, typer.Option("--lookahead", min=1, max=16, help="Tokens in a proposal (K).")
]
Branches = Annotated[
    int, typer.Option("--branches", min=1, max=128, help="Largest number of outcomes (N).")
]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(
        "--dtype", help="Data type of arithmetic and KV; auto: the fastest of the device."
    ),
]
Weights = Annotated[
    Literal["auto", "same", "int8", "int4"],
    typer.Option("--weights", help="Format of the target's weights on a CPU; auto: unchanged."),
]
DraftWeights = Annotated[
    Literal["auto", "same", "int8", "int4"],
    typer.Option("--draft-weights", help="Format of the draft's weights on a CPU."),
]
Engine = Annotated[
    Literal["auto", "openvino", "static", "torch"],
    typer.Option("--engine", help="Executes forward passes; auto: openvino on a CPU."),
]
Device = Annotated[
    str,
    typer.Option("--device", help="cpu, cuda or cuda:N; of the drafts too, unless they have one."),
]
DraftDevice = Annotated[str, typer.Option("--draft-device", help="cpu, cuda or cuda:N.")]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        max=8,
        help="Ranks that share the target's model, each with its own CPUs or GPU: 1, 2, 4 or 8.",
    ),
]
MAX_TEMPERATURE = 2.0
MAX_SEED = 2**64 - 1
Temperature = Annotated[
    float, typer.Option(min=0.0, max=MAX_TEMPERATURE, help="Sampling temperature; 0 is greedy.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=MAX_SEED, help="Seed of the noise; default: random.")
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", "--address", help="Address of a running target; default: start one."
    ),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=1, max=MAX_TOKENS, help="Maximum number of new tokens.")
]
Modes = Literal["auto", "autoregressive", "synchronous", "speculative"]
ModeOption = Annotated[
    Modes,
    typer.Option(
        "--mode",
        help="How rounds run: without a draft, with one in the target's process, or with draft "
        "processes.",
    ),
]
TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        envvar="SSD_TLS_CA",
        help="With --endpoint: PEM file of the authorities of the target's certificate.",
    ),
]
TlsCertificate = Annotated[
    str,
    typer.Option(
        "--tls-certificate",
        envvar="SSD_TLS_CERTIFICATE",
        help="With --tls-ca: PEM file of your certificate, for mutual TLS.",
    ),
]
TlsKey = Annotated[
    str,
    typer.Option("--tls-key", envvar="SSD_TLS_KEY", help="PEM file of the key of the certificate."),
]
TokenFile = Annotated[
    str,
    typer.Option(
        "--token-file",
        envvar="SSD_TOKEN_FILE",
        help="With --endpoint: file whose first line is your token.",
    ),
]
AllowInsecure = Annotated[
    bool,
    typer.Option(
        "--allow-insecure",
        help="With --token-file: send the token to another machine in plain text.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show stack traces.")]


def client_credentials(
    endpoint: str, tls: TlsFiles, token_file: str, *, allow_insecure: bool
) -> ClientCredentials:
    """Return the credentials of these options; an error of theirs is a ``typer.BadParameter``."""
    try:
        credentials = ClientCredentials(
            tls if tls.paths else None, token_file, allow_insecure=allow_insecure
        )
        credentials.check(endpoint)
        return credentials
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter is on the command line, not a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_with_endpoint(context: typer.Context) -> None:
    """Refuse flags of the processes to start."""
    given = [f"--{name.replace('_', '-')}" for name in OF_A_DEPLOYMENT if _is_given(context, name)]
    if given:
        raise typer.BadParameter(
            f"--endpoint names a running target; it cannot be combined with {', '.join(given)}"
        )


def refuse_without_endpoint(context: typer.Context) -> None:
    """Refuse flags of a call to a running target."""
    for name, flag in OF_A_RUNNING_TARGET.items():
        if _is_given(context, name):
            raise typer.BadParameter(
                f"{flag} is for a running target; name it with --endpoint, or leave out {flag}"
            )


def common_flags(lookahead: int, branches: int, dtype: str, engine: str) -> tuple[str, ...]:
    """Return the flags of the target and of its drafts."""
    shape = ("--lookahead", str(lookahead), "--branches", str(branches))
    return (*shape, "--dtype", dtype, "--engine", engine)


def target_flags(ranks: int, weights: str, draft_weights: str, device: str) -> tuple[str, ...]:
    """Return the flags of the target alone."""
    formats = ("--weights", weights, "--draft-weights", draft_weights)
    return ("--tensor-parallel-size", str(ranks), *formats, *device_flags(device))


def device_flags(device: str) -> tuple[str, ...]:
    """Return the flags of a process; none for an empty device, which the environment can set."""
    return ("--device", device) if device else ()

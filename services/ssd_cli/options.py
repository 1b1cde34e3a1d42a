"""Flags that several commands have. Those that belong together are a dataclass.

``with_flags`` turns a parameter whose type is such a dataclass into the flags of its fields.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_type_hints

import typer

from ssd.engine_settings import check_device
from ssd.errors import SettingsError
from ssd.rpc.bounds import MAX_TEMPERATURE
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials, TlsFiles
from ssd.rpc.sampling_codec import SEEDS
from ssd.runtime.launch import Deployment

MAX_TOKENS = 1 << 20
"""More than the maximum length of any model."""

Target = Annotated[
    str,
    typer.Option(envvar="SSD_TARGET_MODEL", help="Model folder, demo://target or hf://…"),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=MAX_TEMPERATURE, help="Sampling temperature; 0 is greedy.")
]
Seed = Annotated[
    int | None, typer.Option(min=SEEDS[0], max=SEEDS[1], help="Seed of the noise; default: random.")
]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", "--address", help="Address of a running target; default: start one."
    ),
]
MaxTokens = Annotated[
    int, typer.Option(min=1, max=MAX_TOKENS, help="Maximum number of new tokens.")
]
WITHOUT_DRAFT_PROCESSES = ("autoregressive", "synchronous")
Modes = Literal["auto", "autoregressive", "synchronous", "speculative"]
WeightFormat = Literal["auto", "same", "int8", "int4"]
Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        min=0.0,
        max=86400.0,
        help="With --endpoint: maximum time to wait for a ready target, in seconds.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show stack traces.")]


CONTEXT = "context"
"""Parameter of a command for the context of typer."""
GIVEN = "given"
"""Field of a dataclass of flags that is no flag: ``GivenFlags``."""


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command as typer needs it: with a parameter for each field of its dataclasses."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    own = signature(command).parameters
    parameters: list[Parameter] = []
    for name, parameter in own.items():
        parameters += (
            [flag for flag in signature(groups[name]).parameters.values() if flag.name != GIVEN]
            if name in groups
            else [parameter.replace(annotation=hints[name])]
        )
    if CONTEXT not in own:
        parameters.append(Parameter(CONTEXT, Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @wraps(command)
    def run(**flags: Any) -> None:
        context = flags[CONTEXT]
        flags[GIVEN] = frozenset(name for name in flags if _is_given(context, name))
        for name, group in groups.items():
            flags[name] = group(**{field.name: flags[field.name] for field in fields(group)})
        command(**{name: flags[name] for name in own})

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


@dataclass(frozen=True, kw_only=True)
class GivenFlags:
    """Base of flags that a process has too. Without one, it reads its environment."""

    given: frozenset[str] = frozenset()
    """Names of the parameters that are on the command line."""

    def flags_of(self, *names: str, prefix: str = "") -> tuple[str, ...]:
        """Return the flags among these that are on the command line, without a prefix."""
        values = {
            _flag(name.removeprefix(prefix)): str(getattr(self, name))
            for name in names
            if name in self.given
        }
        return tuple(word for pair in values.items() for word in pair)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The models of the processes to start. A running target has its own."""

    target: Target = "demo://target"
    draft: Annotated[
        str, typer.Option(envvar="SSD_DRAFT_MODEL", help="Model folder, demo://draft or hf://…")
    ] = "demo://draft"


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """How the processes to start use drafts."""

    num_drafts: Annotated[int, typer.Option(min=0, max=64, help="Number of draft processes.")] = 1
    mode: Annotated[
        Modes,
        typer.Option(
            help="How rounds run: without a draft, with one in the target's process, or with draft "
            "processes.",
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        """Refuse a mode that needs a draft without one."""
        if self.mode == "speculative" and self.num_drafts == 0:
            raise typer.BadParameter("--mode speculative needs a draft, but --num-drafts is 0")


@dataclass(frozen=True, kw_only=True)
class Shape(GivenFlags):
    """Sizes of proposals and tables."""

    lookahead: Annotated[int, typer.Option(min=1, max=16, help="Tokens in a proposal (K).")] = 6
    branches: Annotated[
        int, typer.Option(min=1, max=128, help="Largest number of outcomes (N).")
    ] = 24

    @property
    def shape_flags(self) -> tuple[str, ...]:
        """Flags of the target and of its drafts."""
        return self.flags_of("lookahead", "branches")


@dataclass(frozen=True, kw_only=True)
class Numerics(GivenFlags):
    """What executes the passes, and in which numbers."""

    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option(help="Data type of arithmetic and KV; auto: the fastest of the device."),
    ] = "auto"
    engine: Annotated[
        Literal["auto", "openvino", "static", "torch"],
        typer.Option(help="Executes forward passes; auto: openvino on a CPU."),
    ] = "auto"

    @property
    def numeric_flags(self) -> tuple[str, ...]:
        """Flags of the target and of its drafts."""
        return self.flags_of("dtype", "engine")


def _device_flags(name: str, device: str) -> tuple[str, ...]:
    """Return the flag of a process for a device, which the flag ``name`` gives; none if empty."""
    if not device:
        return ()
    try:
        check_device(name, device)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    return ("--device", device)


@dataclass(frozen=True, kw_only=True)
class Places(GivenFlags):
    """Devices of the models, and formats of their weights."""

    weights: Annotated[
        WeightFormat,
        typer.Option(help="Format of the target's weights on a CPU; auto: not quantised."),
    ] = "auto"
    draft_weights: Annotated[
        WeightFormat, typer.Option(help="Format of the draft's weights on a CPU.")
    ] = "auto"
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N; of the drafts too, unless they have one.")
    ] = ""
    draft_device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = ""

    @property
    def target_flags(self) -> tuple[str, ...]:
        """Flags of the target alone."""
        formats = self.flags_of("weights", "draft_weights")
        return (*formats, *_device_flags("--device", self.device))

    @property
    def draft_flags(self) -> tuple[str, ...]:
        """Flags of the drafts alone."""
        own = _device_flags("--draft-device", self.draft_device)
        formats = self.flags_of("draft_weights", prefix="draft_")
        return (*formats, *(own or _device_flags("--device", self.device)))


@dataclass(frozen=True, kw_only=True)
class Processes(Pair, Drafts, Shape, Numerics, Places):
    """A target and its drafts on this machine."""

    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            min=1,
            max=8,
            help="Ranks that share the target's model, each with its own CPUs or GPU: 1, 2, 4, 8.",
        ),
    ] = 1

    def deployment(self, **others: Any) -> Deployment:
        """Return the processes to start; ``others`` are further fields."""
        return Deployment(
            target=self.target,
            draft=self.draft,
            num_drafts=0 if self.mode in WITHOUT_DRAFT_PROCESSES else self.num_drafts,
            is_synchronous=self.mode == "synchronous",
            common_flags=(*self.shape_flags, *self.numeric_flags),
            target_flags=(*self.flags_of("tensor_parallel_size"), *self.target_flags),
            draft_flags=self.draft_flags,
            **others,
        )


@dataclass(frozen=True, kw_only=True)
class Access:
    """Credentials of a call to a running target."""

    tls_ca: Annotated[
        str,
        typer.Option(
            envvar="SSD_TLS_CA",
            help="With --endpoint: PEM file of the authorities of the target's certificate.",
        ),
    ] = ""
    tls_certificate: Annotated[
        str,
        typer.Option(
            envvar="SSD_TLS_CERTIFICATE",
            help="With --tls-ca: PEM file of your certificate, for mutual TLS.",
        ),
    ] = ""
    tls_key: Annotated[
        str, typer.Option(envvar="SSD_TLS_KEY", help="PEM file of the key of the certificate.")
    ] = ""
    token_file: Annotated[
        str,
        typer.Option(
            envvar="SSD_TOKEN_FILE", help="With --endpoint: file whose first line is your token."
        ),
    ] = ""
    allow_insecure: Annotated[
        bool,
        typer.Option(
            "--allow-insecure",
            help="With --token-file: send the token to another machine in plain text.",
        ),
    ] = False

    def credentials(self, endpoint: str | None) -> ClientCredentials:
        """Return the credentials for an endpoint, which is checked too; none without one.

        Raises:
            typer.BadParameter: the endpoint is not ``host:port``, or the files do not fit.
        """
        if endpoint is None:
            return NO_CREDENTIALS
        check_endpoint(endpoint)
        tls = TlsFiles(certificate=self.tls_certificate, key=self.tls_key, ca=self.tls_ca)
        try:
            credentials = ClientCredentials(
                tls if tls.paths else None, self.token_file, allow_insecure=self.allow_insecure
            )
            credentials.check(endpoint)
        except SettingsError as error:
            raise typer.BadParameter(str(error)) from None
        return credentials


OF_A_DEPLOYMENT = {field.name for field in fields(Processes)} - {"mode"}
"""Parameters of the processes to start; the mode is one of a request too."""
OF_A_RUNNING_TARGET = ("wait_seconds", *(field.name for field in fields(Access)))
"""Parameters of a call to a running target."""


def check_flags(context: typer.Context, endpoint: str | None) -> None:
    """Refuse flags of processes to start beside an endpoint, and those of a call without one."""
    passed = [name for name in context.params if _is_given(context, name)]
    if endpoint is not None:
        wrong = [_flag(name) for name in passed if name in OF_A_DEPLOYMENT]
        if wrong:
            raise typer.BadParameter(
                f"--endpoint names a running target; it cannot be combined with {', '.join(wrong)}"
            )
        return
    for flag in (_flag(name) for name in passed if name in OF_A_RUNNING_TARGET):
        raise typer.BadParameter(
            f"{flag} is for a running target; name it with --endpoint, or leave out {flag}"
        )


def _is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter is on the command line, not a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_seconds").replace("_", "-")


def check_endpoint(endpoint: str) -> None:
    """Raise ``typer.BadParameter`` unless it is ``host:port``."""
    host, _, port = endpoint.rpartition(":")
    # gRPC would connect to a port above 65535 modulo 65536.
    is_port = port.isdecimal() and 1 <= int(port) <= 65535
    if not host or "/" in host.removeprefix("dns:///") or not is_port:
        raise typer.BadParameter(
            f"--endpoint {endpoint!r} is not host:port with port 1..65535, for example "
            "127.0.0.1:50051"
        )

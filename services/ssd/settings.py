"""Settings of a process: one frozen dataclass, read once.

Precedence: defaults < ``--config FILE`` (YAML) < environment (``PREFIX_FIELD``) < flags
(``--field value``, ``--flag``/``--no-flag``). An unknown key is an error that names the nearest
valid one. The attribute docstring of a field is its description; ``field(metadata={"min": ...,
"max": ...})`` has its bounds.

*Decision*: a loader for dataclasses, made of argparse and PyYAML. *Because*: pydantic-settings
2.16, to which all settings were converted for a measurement, saved only 54 lines of services and
operator. Unknown variables and flags with the nearest name, missing files, lists with commas and
the source of a wrong value still needed code of their own. Imports took longer (medians of 7
interleaved runs): this module 202 ms instead of 61, ``ssd.rpc.client`` 323 instead of 215, ``ssd
--help`` 518 instead of 394, the help of a target 2,075 instead of 1,987. The base had six more
packages of 10 MB. Help had ``tuple[str,...]`` for a list and ``()`` for an empty one, and the
values of a repeated flag were joined. *Not chosen*: pydantic alone, which has most of the size and
leaves the code of flags and help. *Revisit when* the base needs pydantic for another reason, or
settings contain other settings.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import inspect
import ipaddress
import json
import math
import os
import socket
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import yaml

import ssd
from ssd.errors import SettingsError

Settings = TypeVar("Settings")
TERMINATION_LOG = "/dev/termination-log"
"""File from which a kubelet reads why a container ended. It exists only in containers."""
_BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


@dataclass(frozen=True, slots=True)
class Loaded(typing.Generic[Settings]):
    """Settings, and what to do with them."""

    settings: Settings
    is_only_shown: bool
    """Whether ``--print-config`` was given: the values are printed and no process starts."""


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def load(
    cls: type[Settings],
    argv: Sequence[str],
    *,
    prefix: str,
    environ: Mapping[str, str] | None = None,
) -> Loaded[Settings]:
    """Read the settings of a process.

    Args:
        cls: a frozen dataclass whose fields all have defaults.
        argv: the command line, without the program.
        prefix: of environment variables, ``SSD_TARGET``.
        environ: the environment; the process's own when None.

    Returns:
        The settings. ``--help`` and ``--version`` print and exit with SystemExit(0).

    Raises:
        SettingsError: an unknown key, or a value of the wrong type or out of bounds.
    """
    arguments = _arguments(cls, argv, prefix)
    texts: dict[str, tuple[Any, str]] = {}
    if arguments.config is not None:
        texts |= _from_file(Path(arguments.config), cls)
    texts |= _from_environment(os.environ if environ is None else environ, prefix, cls)
    for name in _names(cls):
        if (value := getattr(arguments, name)) is not None:
            texts[name] = (value, f"flag {_flag(name)}")
    return Loaded(_made(cls, texts), arguments.print_config)


def from_mapping(cls: type[Settings], values: Mapping[str, object], source: str) -> Settings:
    """Read settings from a mapping of names to values.

    Raises:
        SettingsError: an unknown key, or a value of the wrong type or out of bounds.
    """
    _refuse_unknown(values, f"{source}: ", _names(cls))
    return _made(cls, {name: (value, source) for name, value in values.items()})


def to_json(settings: object) -> str:
    """Return all values as one JSON object, which ``--config`` can read, because it is YAML."""
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}  # type: ignore[arg-type]
    return json.dumps(values, indent=2)


def quiet_grpc() -> None:
    """Suppress INFO lines of gRPC on standard error, unless the environment sets a verbosity.

    gRPC reads the variable when its core starts. Otherwise a lost connection writes a line of its
    own in addition to our error.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def gpu_lists() -> tuple[str | None, str | None]:
    """Return ``CUDA_VISIBLE_DEVICES`` and ``NVIDIA_VISIBLE_DEVICES``; None for one that is not set.

    The first restricts CUDA in a process. The second sets for a container runtime which GPUs a
    container sees.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("NVIDIA_VISIBLE_DEVICES")


def show_gpus(ids: Sequence[str]) -> None:
    """Restrict CUDA to these GPUs, in this process and in those that it will start."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)


def load_kernels_early() -> None:
    """Let CUDA load all kernels when it starts, here and in processes that this one will start.

    Otherwise the first launch of a kernel waits until the device is idle, and a receive that NCCL
    has posted keeps it busy until the peer sends. A value of the user stays.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


HUGE_PAGES = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
"""Lets malloc of glibc >= 2.35 request huge pages; the image has the same variable.

A forward pass reads all weights, and each page of 4 KiB needs its own address translation.

*Decision*: the variable, which holds for all memory of a process. *Because*: with it, a pass of the
target of 208M weights in bfloat16 takes .92 to .97 of the time (30 pairs of passes of three shapes,
a virtual machine with AMX whose kernel has huge pages on request). *Not chosen*: ``madvise`` with
MADV_COLLAPSE after the load, which gains as much, and takes 1.3 s. *Revisit when* most kernels use
huge pages without a request.
"""


def child_environment() -> dict[str, str]:
    """Return the environment of a child process; a variable that the user has set stays."""
    return dict([HUGE_PAGES]) | dict(os.environ)


def nccl_log() -> Path | None:
    """Return the file of NCCL's log, if the environment asks NCCL to write one."""
    pattern = os.environ.get("NCCL_DEBUG_FILE", "")
    if not pattern or os.environ.get("NCCL_DEBUG", "").upper() not in {"INFO", "TRACE"}:
        return None
    return Path(pattern.replace("%h", socket.gethostname()).replace("%p", str(os.getpid())))


def cache_folder() -> Path:
    """Return the folder for files of this user that can be made again.

    Raises:
        RuntimeError: the user has no home folder, as in a container.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd"


def inherited_variables() -> dict[str, str]:
    """Return the variables that change what targets and drafts compute, or how fast."""
    prefixes = ("SSD_TARGET_", "SSD_DRAFT_", "CUDA_", "GLIBC_")
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes)}


def find_text(
    name: str,
    argv: Sequence[str],
    *,
    prefix: str,
    default: str = "",
    environ: Mapping[str, str] | None = None,
) -> str:
    """Return one setting from flags or environment, after ``load`` has refused another one."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    variables = os.environ if environ is None else environ
    default = variables.get(f"{prefix}_{name.upper()}", default)
    parser.add_argument(f"--{name.replace('_', '-')}", dest="text", nargs="?", default=default)
    text: str | None = parser.parse_known_args(list(argv))[0].text
    return text or ""


@functools.cache
def field_help(cls: type) -> Mapping[str, str]:
    """Return the docstring of each field of a class and its bases, whitespace folded.

    A class whose source is missing has none.
    """
    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue
        for pair in pairwise(typing.cast("ast.ClassDef", tree.body[0]).body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    helps[name] = " ".join(text.split())
    return helps


def check_callers(host: str, name: str, *, has_tokens: bool, has_tls: bool) -> None:
    """Check that a port without mutual TLS is on the loopback, or has tokens and TLS.

    Raises:
        SettingsError: it has not; ``name`` is the setting of its tokens.
    """
    if is_loopback(host):
        return
    if not has_tokens:
        raise SettingsError(
            f"every machine that reaches {host} could call this process: set {name} "
            "or tls_client_ca, or allow_insecure if the network protects the port"
        )
    if not has_tls:
        raise SettingsError(
            f"callers of {host} would send their tokens in plain text: set "
            "tls_certificate and tls_key, or allow_insecure if the network protects the port"
        )


def parse_cpus(name: str, text: str) -> frozenset[int]:
    """Return the CPU numbers of a list such as ``0,2-3``.

    Raises:
        SettingsError: the text is not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, _, last = part.partition("-")
        is_list = first.isdecimal() and (last or first).isdecimal()
        if not is_list or int(last or first) < int(first):
            raise SettingsError(f"{name}: {text!r} is not a list of CPUs such as 0,2-3")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def did_you_mean(name: str, valid: Iterable[str], prefix: str = "") -> str:
    """Return the hint of the nearest valid name; empty if none is near.

    The prefix of all names makes none more alike.
    """
    names = [option.removeprefix(prefix) for option in valid]
    near = difflib.get_close_matches(name.removeprefix(prefix), names, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _names(cls: type) -> list[str]:
    return [item.name for item in fields(cls)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _arguments(cls: type, argv: Sequence[str], prefix: str) -> argparse.Namespace:
    program = f"python -m {prefix.lower()}"
    parser = _Parser(prog=program, description=inspect.getdoc(cls), allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="check all settings, print them as JSON and exit",
    )
    parser.add_argument("--version", action="version", version=f"ssd {ssd.__version__}")
    helps, kinds = field_help(cls), typing.get_type_hints(cls)
    for item in fields(cls):
        kind, text = kinds[item.name], helps.get(item.name, "")
        options: dict[str, Any] = {"metavar": _shape(kind)}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        text = f"{text} (default: {_shown(item.default)})".replace("%", "%%")
        parser.add_argument(_flag(item.name), default=None, dest=item.name, help=text, **options)
    arguments, rest = parser.parse_known_args(list(argv))
    flags = ["--config", *map(_flag, _names(cls))]
    _refuse_unknown((argument.partition("=")[0] for argument in rest), "", flags, "--")
    return arguments


def _from_file(path: Path, cls: type) -> dict[str, tuple[Any, str]]:
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: not YAML: {error}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise SettingsError(f"--config {path}: it must be a mapping of names to values")
    _refuse_unknown(document, f"{path}: ", _names(cls))
    return {name: (value, f"file {path}") for name, value in document.items()}


def _from_environment(
    environ: Mapping[str, str], prefix: str, cls: type
) -> dict[str, tuple[Any, str]]:
    start = f"{prefix}_"
    variables = {name: text for name, text in environ.items() if name.startswith(start)}
    valid = [start + name.upper() for name in _names(cls)]
    _refuse_unknown(variables, "environment: ", valid, start)
    return {
        name.removeprefix(start).lower(): (text, f"environment {name}")
        for name, text in variables.items()
    }


def _refuse_unknown(
    keys: Iterable[object], where: str, valid: Sequence[str], prefix: str = ""
) -> None:
    """Refuse a name that no setting has."""
    for name in map(str, keys):
        if name in valid:
            continue
        hint = did_you_mean(name, valid, prefix)
        raise SettingsError(f"{where}unknown setting {name}{hint}")


def _made(cls: type[Settings], texts: Mapping[str, tuple[Any, str]]) -> Settings:
    """Convert the values, each with its source, to the types of their fields; check the bounds."""
    kinds = typing.get_type_hints(cls)
    fields_by_name = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    return cls(
        **{
            name: _checked(fields_by_name[name], kinds[name], value, f"{name} ({source})")
            for name, (value, source) in texts.items()
        }
    )


def _checked(item: "Field[Any]", kind: Any, value: Any, where: str) -> Any:
    converted = _convert(where, kind, value)
    low, high = item.metadata.get("min", -math.inf), item.metadata.get("max", math.inf)
    if kind is float and not math.isfinite(converted):
        raise SettingsError(f"{where}: {converted} is not a finite number")
    if kind in (int, float) and not low <= converted <= high:
        raise SettingsError(f"{where}: {converted} is outside {low}..{high}")
    return converted


def _convert(where: str, kind: Any, value: Any) -> Any:
    if get_origin(kind) is Literal:
        return _choice(where, get_args(kind), value)
    if get_origin(kind) is tuple:
        return tuple(_convert(where, get_args(kind)[0], part) for part in _parts(where, value))
    if kind in (int, float):
        return _number(where, kind, value)
    if kind is bool:
        if (word := str(value).lower()) not in _BOOLEANS:
            raise SettingsError(f"{where}: {value!r} is not true or false")
        return _BOOLEANS[word]
    if kind is not str or not isinstance(value, str):
        raise SettingsError(f"{where}: {value!r} is not {_shape(kind)}")
    return value


def _parts(where: str, value: Any) -> list[Any]:
    """Return the parts of a list, without blanks around them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise SettingsError(f"{where}: {value!r} is not a list")
    return [part.strip() if isinstance(part, str) else part for part in value]


def _choice(where: str, choices: Sequence[Any], value: Any) -> Any:
    for choice in choices:
        if value in (choice, str(choice)):
            return choice
    names = [str(choice) for choice in choices]
    hint = did_you_mean(str(value), names)
    raise SettingsError(f"{where}: {value!r} is not one of {', '.join(names)}{hint}")


def _number(where: str, kind: type[int] | type[float], value: Any) -> int | float:
    # YAML values can be booleans and fractions; int() accepts both without an error.
    is_lossy = isinstance(value, bool) or (kind is int and isinstance(value, float))
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if not is_lossy:
            return kind(value)
    raise SettingsError(f"{where}: {value!r} is not a {'whole ' if kind is int else ''}number")


def _shape(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"{_shape(get_args(kind)[0])},…"
    names = {int: "INT", float: "NUMBER", str: "TEXT"}
    return names.get(kind) or "|".join(map(str, get_args(kind)))


def _shown(value: object) -> str:
    return (",".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "none"


def is_local(address: str) -> bool:
    """Whether an address ``host:port`` is one of this machine alone."""
    return is_loopback(address.removeprefix("dns:///").rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.removesuffix(".") == "localhost"
    mapped = address.ipv4_mapped if address.version == 6 else None
    return (mapped or address).is_loopback

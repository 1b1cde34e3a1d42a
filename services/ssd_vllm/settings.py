"""Settings of the plugin: the key ``ssd`` of vLLM's ``--additional-config``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ssd.errors import SettingsError
from ssd.pool.settings import DraftsSettings
from ssd.rpc.access import Access, Security
from ssd.rpc.credentials import AcceptedTokens, TlsFiles
from ssd.rpc.security import role_of
from ssd.settings import check_callers, from_mapping
from ssd.types import FanOutName

KEY = "ssd"
SOURCE = f"--additional-config {KEY}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings(DraftsSettings):
    """Settings of vLLM as a target; names and defaults are those of ``ssd-target``."""

    mode: Literal["auto", "speculative"] = "auto"
    """``auto``: a controller measures steps with and without proposals, and uses the faster kind.
    ``speculative``: every step has proposals."""
    sampling: Literal["coupled", "stock"] = "coupled"
    """How tokens are drawn at temperatures above 0. ``coupled``: the largest processed logit plus
    the noise of (seed, position), which drafts foresee. ``stock``: vLLM's own rule; drafts propose
    the most probable tokens, of which fewer are accepted."""
    fan_out: FanOutName = "adaptive"
    """Policy by which drafts select the outcomes that get a branch."""
    admin_port: int = field(default=0, metadata={"min": 0, "max": 65535})
    """Port of ``ssd.v1.AdminService`` and of gRPC health, on the first rank; 0: none. Replica *i*
    of a data-parallel server uses the port plus *i*."""
    admin_host: str = "127.0.0.1"
    """Address of this port; ``0.0.0.0`` or ``::`` for all addresses."""
    tls_client_ca: str = ""
    """PEM file of authorities. A caller of the port then needs a certificate of one of them."""
    admin_token_file: str = ""
    """File of tokens, one a line, of which a caller of the port needs one."""
    admin_names: tuple[str, ...] = ()
    """Names in certificates, of which a caller of the port needs one."""
    token_file: str = ""
    """File of tokens, one a line, of which a request to vLLM needs one. ``python -m ssd_vllm``
    checks them; ``vllm serve`` needs ``--middleware ssd_vllm.Gate`` for it."""

    def __post_init__(self) -> None:
        DraftsSettings.__post_init__(self)
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise SettingsError("tls_certificate and tls_key: give both, or neither")
        if self.tls_client_ca and not self.tls_certificate:
            raise SettingsError("tls_client_ca needs tls_certificate and tls_key")
        if self.admin_names and not self.tls_client_ca:
            raise SettingsError("admin_names are names in certificates, which need tls_client_ca")
        if self.admin_port and not (self.tls_client_ca or self.allow_insecure):
            check_callers(
                self.admin_host,
                "admin_token_file",
                has_tokens=bool(self.admin_token_file),
                has_tls=bool(self.tls_certificate),
            )

    def check_drafts(self) -> None:
        """Check that there are drafts; the worker alone needs none.

        Raises:
            SettingsError: there are none.
        """
        if not self.drafts:
            raise SettingsError(
                f'{SOURCE}: give the drafts, for example {{"drafts": ["host:50052"]}}'
            )

    def security(self) -> Security:
        """Return who may call the port, and its certificate.

        Raises:
            SettingsError: a file is missing or invalid.
        """
        tls = None
        if self.tls_certificate:
            tls = TlsFiles(
                certificate=self.tls_certificate, key=self.tls_key, ca=self.tls_client_ca
            )
            tls.read()
        role = role_of("admin", self.admin_token_file, self.admin_names)
        return Security(tls=tls, access=Access(role=role))

    def tokens(self) -> AcceptedTokens | None:
        """Return the tokens of clients of vLLM; None if they need none.

        Raises:
            SettingsError: the file is missing or invalid.
        """
        return AcceptedTokens(self.token_file) if self.token_file else None

    def check_files(self) -> None:
        """Check the files of certificates and tokens.

        Raises:
            SettingsError: one is missing or invalid.
        """
        self.link_credentials()
        self.security()
        self.tokens()


def read(additional_config: Mapping[str, object]) -> PluginSettings:
    """Return the settings in vLLM's ``additional_config``.

    Raises:
        SettingsError: the key is missing, or a name or value is wrong.
    """
    values = additional_config.get(KEY, {})
    if not isinstance(values, Mapping):
        raise SettingsError(f"{SOURCE}: it must be a mapping of names to values")
    return from_mapping(PluginSettings, values, SOURCE)

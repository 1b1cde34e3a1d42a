"""The command ``ssd pool``: its flags."""

from typing import Annotated

import typer

from ssd.rpc.client import TargetClient
from ssd.rpc.credentials import TlsFiles
from ssd_cli.commands import run_work
from ssd_cli.generate import check_endpoint
from ssd_cli.options import (
    AllowInsecure,
    Debug,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TokenFile,
    client_credentials,
)
from ssd_cli.pool_view import show_pool


def pool_command(
    *,
    endpoint: Annotated[
        str, typer.Option("--endpoint", "--address", help="Address of a running target.")
    ] = "127.0.0.1:50051",
    tls_ca: TlsCa = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    token_file: TokenFile = "",
    allow_insecure: AllowInsecure = False,
    is_once: Annotated[bool, typer.Option("--once", help="Print the present state.")] = False,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the present state as one JSON object.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show the drafts of a target: sessions, links, hit rates, and whether it speculates.

    The view changes with the pool until Ctrl-C. Redirected output has the
    present state only.
    """
    check_endpoint(endpoint)
    tls = TlsFiles(certificate=tls_certificate, key=tls_key, ca=tls_ca)
    client = TargetClient(
        endpoint,
        credentials=client_credentials(endpoint, tls, token_file, allow_insecure=allow_insecure),
        ready_seconds=0,
    )
    run_work(show_pool(client, is_json=is_json, is_once=is_once), is_debug=debug)

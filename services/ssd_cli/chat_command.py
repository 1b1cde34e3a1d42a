"""The command ``ssd chat``: its flags."""

import sys
from typing import Annotated

import typer

from ssd.launch import Deployment
from ssd.rpc.credentials import NO_CREDENTIALS, TlsFiles
from ssd.types import Mode
from ssd_cli.chat import ChatSettings, chat
from ssd_cli.commands import (
    check_drafts,
    check_models,
    check_temperature,
    run_work,
    warn_about_one_cpu,
)
from ssd_cli.generate import GenerateOptions, check_endpoint
from ssd_cli.line_input import open_lines
from ssd_cli.options import (
    AllowInsecure,
    Debug,
    Draft,
    Endpoint,
    MaxTokens,
    ModeOption,
    NumDrafts,
    Seed,
    Target,
    Temperature,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TokenFile,
    client_credentials,
    refuse_with_endpoint,
    refuse_without_endpoint,
)


def chat_command(
    context: typer.Context,
    *,
    endpoint: Endpoint = None,
    tls_ca: TlsCa = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    token_file: TokenFile = "",
    allow_insecure: AllowInsecure = False,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    num_drafts: NumDrafts = 1,
    mode: ModeOption = "auto",
    temperature: Temperature = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    shows_metrics: Annotated[
        bool, typer.Option("--metrics", help="Print one line of figures after each answer.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Chat with a model.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D at the prompt ends
    the program.
    Without a terminal, each line of standard input is a message or a command;
    the exit code is 1 if one of them had an error.
    """
    credentials = NO_CREDENTIALS
    if endpoint is not None:
        refuse_with_endpoint(context)
        check_endpoint(endpoint)
        tls = TlsFiles(certificate=tls_certificate, key=tls_key, ca=tls_ca)
        credentials = client_credentials(endpoint, tls, token_file, allow_insecure=allow_insecure)
    else:
        refuse_without_endpoint(context)
    check_temperature(temperature)
    check_drafts(mode, num_drafts)
    options = GenerateOptions(
        endpoint=endpoint,
        credentials=credentials,
        deployment=Deployment(
            target=target,
            draft=draft,
            num_drafts=num_drafts,
            # For /mode synchronous.
            is_synchronous=True,
        ),
        is_quiet=False,
    )
    if endpoint is None:
        check_models(options.deployment)
        warn_about_one_cpu(options.deployment)
    settings = ChatSettings(
        mode=Mode(mode), temperature=temperature, seed=seed, max_tokens=max_tokens
    )
    lines = open_lines(sys.stdin.fileno())
    work = chat(options, settings, lines, shows_metrics=shows_metrics)
    raise typer.Exit(run_work(work, is_debug=debug))

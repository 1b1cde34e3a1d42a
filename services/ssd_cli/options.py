"""Flags that several commands have."""

from typing import Annotated, Literal

import typer

MAX_TOKENS = 1 << 20
"""More than the maximum length of any model."""

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
        "--dtype", help="Data type of weights and KV; auto: bfloat16 if the device supports it."
    ),
]
Engine = Annotated[
    Literal["auto", "openvino", "static", "torch"],
    typer.Option("--engine", help="Executes forward passes; auto: openvino in float32 on a CPU."),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        max=8,
        help="Ranks that share the target's model, each with its own CPUs or GPU: 1, 2, 4 or 8.",
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 is greedy.")
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
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show stack traces.")]

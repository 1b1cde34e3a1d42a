"""Rules of the engines of targets: a field that an engine cannot obey is refused, with the fix."""


def _without(names: str, message: str) -> tuple[str, str]:
    """Refuse arguments by name, with one or two dashes; each ``-`` of a name is also ``_``.

    vLLM reads ``_`` as ``-``, and ``--speculative-config.key=1`` as one key of the value. The
    process refuses abbreviations of names with two dashes (``ssd_vllm.__main__``), and argparse
    accepts those with one: ``-t`` is ``-tp``, ``-s`` is ``-sc``.
    """
    pattern = names.replace("-", "[-_]")
    return f"!self.exists(a, a.matches('^--?({pattern})([.=].*)?$'))", message


VLLM_ARGS_RULES = (
    _without(
        "model|revision|served-model-name|dtype|max-model-len|tensor-parallel-size|tp?"
        "|speculative-config|sc?|spec-(method|model|tokens)|additional-config|shutdown-timeout",
        "args: fields of the resource set these arguments: target.source (--model, "
        "--revision), model (--served-model-name, --dtype, --max-model-len), "
        "target.tensorParallelSize, target.drainSeconds (--shutdown-timeout), speculation "
        "(--speculative-config, --additional-config)",
    ),
    _without(
        "worker-cls|host|port|uds|config|ssl-.*|root-path|headless|print-config",
        "args: --worker-cls, --host, --port, --uds, --config, --root-path, --ssl-*, --headless "
        "and --print-config are the operator's, leave them out",
    ),
    _without(
        "(pipeline|data|prefill-context)-parallel-.*|pp|dp.?|pcp?|nnodes|n[0123456789]*",
        "args: a target has tensorParallelSize GPUs and one replica of the model: leave "
        "pipeline, data and prefill-context parallel arguments out, and use target.replicas",
    ),
)
"""Rules of the additional arguments of vLLM."""


def _with_vllm(wanted: str, message: str) -> tuple[str, str]:
    return f"self.target.engine != 'vllm' || ({wanted})", message


VLLM_RULES = (
    (
        "self.target.engine == 'vllm' || !has(self.target.args) || self.target.args.size() == 0",
        "target.args: only engine vllm has arguments, give target.engine vllm or leave them out",
    ),
    _with_vllm(
        "!has(self.target.ssd)", "target.ssd: engine vllm has arguments instead, give target.args"
    ),
    _with_vllm(
        "!self.target.source.uri.startsWith('hf://') || !has(self.target.args)"
        " || !self.target.args.exists(a, a.matches('^--trust[-_]remote[-_]code$'))",
        "target.args: hf:// fetches no code of a model's repository: leave --trust-remote-code "
        "out, or give target.source pvc://claim/path, a folder with the code and the model",
    ),
    _with_vllm(
        "self.target.weights == 'Auto'",
        "target.weights: with engine vllm give --quantization in target.args",
    ),
    _with_vllm(
        "!self.gateway.enabled",
        "gateway: vLLM serves the OpenAI API itself, leave the gateway out with engine vllm",
    ),
    _with_vllm(
        "self.transport.channel == 'Grpc' && !has(self.transport.maxRoundTripMicroseconds)",
        "transport: links of engine vllm use gRPC and have no limit, leave channel and "
        "maxRoundTripMicroseconds out",
    ),
    _with_vllm(
        "!has(self.security.tls) || self.security.tls.mode != 'Mutual'"
        " || has(self.security.tokenSecretName)",
        "security.tls.mode: clients of vLLM present a token and no certificate, because the "
        "kubelet probes the same port and has none: give security.tokenSecretName with Mutual",
    ),
    _with_vllm(
        "!has(self.security.tls) || !has(self.security.tls.clientNames)"
        " || self.security.tls.clientNames.size() == 0",
        "security.tls.clientNames: clients of vLLM present a token and no certificate, because "
        "the kubelet probes the same port and has none: leave clientNames out",
    ),
)
"""Rules of a spec about engine vllm."""

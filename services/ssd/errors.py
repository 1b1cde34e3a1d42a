"""The error tree. ``rpc/status.py`` maps each leaf to a gRPC code, an HTTP status and details.

    SSDError
    ├── RequestError              invalid input; only this request fails
    │   ├── FieldError            a field is out of range; ``field`` names it
    │   │   └── PromptSizeError   a prompt has more bytes than any that is accepted
    │   ├── ContextLengthError    prompt + new tokens exceed the model's length
    │   ├── UnknownModelError     the model is not served
    │   ├── TooLargeError         client only: a message exceeds the receiver's limit
    │   └── UnsupportedError      not implemented yet; ``field`` names it
    ├── OverloadedError           a bound is reached; retry after ``retry_after_seconds``
    ├── NotReadyError             loading or draining
    │   ├── UnknownHostError      client only: the name of the server has no address
    │   └── IncompleteTextError   client only: the text ended early
    │       └── AbandonedTextError   the target ended it
    ├── AccessError               missing or wrong credentials
    │   └── NotAllowedError       valid credentials without the right to make this call
    ├── CancelledError            the request was cancelled by its client or by a drain
    │   └── DeadlineError         the deadline passed
    ├── NotFiniteError            the model computed NaN or infinity for one sequence
    ├── InternalError             client only: the server failed
    ├── RankError                 a rank of the model has ended or does not answer
    ├── LinkError                 a target-draft link failed; costs speed, never a token
    │   ├── FrameError            a malformed frame, or one over its limits
    │   └── HandshakeError        the two ends differ; ``field`` names the difference
    └── SetupError                the process cannot start
        ├── SettingsError         an unknown key or a value out of bounds
        ├── ModelNotFoundError    no such folder, or no config in it
        ├── HubError              the hub does not respond, and the model is not local
        ├── CacheError            the model cache is full
        ├── UnsupportedModelError a family or feature that the engine does not support
        ├── WeightsError          a missing, surplus, truncated or misshapen tensor
        ├── TokenizerError        no tokenizer, or different tokenizers in target and draft
        ├── MemoryBudgetError     the KV cache cannot hold one sequence
        └── AddressError          a port is in use or an address cannot be bound

A message contains the actual value, the allowed value, and the fix.
"""


class SSDError(Exception):
    """Base of all errors that this product raises."""


class RequestError(SSDError):
    """The input of a request is invalid; only this request fails."""


class FieldError(RequestError):
    """A field of a request is out of range.

    Attributes:
        field: path of the field, as in the proto (``sampling.temperature``).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class PromptSizeError(FieldError):
    """A prompt has more bytes than any that is accepted, so it was not tokenized."""


class ContextLengthError(RequestError):
    """Prompt and new tokens together exceed the model's length.

    Attributes:
        field: path of the field that holds the prompt.
    """

    def __init__(
        self, prompt_tokens: int, max_tokens: int, max_model_len: int, field: str = "input"
    ) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"{prompt_tokens + max_tokens}, over max_model_len {max_model_len}; shorten either"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.field = field


class UnknownModelError(RequestError):
    """The model is not served."""


class UnsupportedError(RequestError):
    """A field or method that is declared but not implemented yet.

    Attributes:
        field: path of the field or name of the method.
    """

    def __init__(self, field: str, message: str = "not served by this version") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class TooLargeError(RequestError):
    """A message exceeds the size that its receiver accepts. Only clients raise it."""


class OverloadedError(SSDError):
    """A bound is reached; the request has not run."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NotReadyError(SSDError):
    """The process is loading or draining."""


class UnknownHostError(NotReadyError):
    """The name of the server has no address. Only clients raise it."""


class IncompleteTextError(NotReadyError):
    """The connection was lost after the first token, or the target stops. Only clients raise it."""


class AbandonedTextError(IncompleteTextError):
    """The target ended a text early: it stops, or its tokens were read too late."""


class AccessError(SSDError):
    """Missing or wrong credentials."""


class NotAllowedError(AccessError):
    """The credentials are valid, but do not give the right to make this call."""


class CancelledError(SSDError):
    """The request was cancelled by its client or by a drain."""


class DeadlineError(CancelledError):
    """The deadline of a call passed."""


class NotFiniteError(SSDError):
    """The model computed NaN or infinity for one sequence; only this request fails."""


class InternalError(SSDError):
    """The server failed; its log has the cause with the request id. Only clients raise it."""


class RankError(SSDError):
    """A rank of the model has ended or does not answer; the target ends."""


class LinkError(SSDError):
    """A target-draft link failed. It costs speed, never a token."""


class FrameError(LinkError):
    """A frame is malformed, over its limits or of another version."""


class HandshakeError(LinkError):
    """The two ends of a link differ.

    Attributes:
        field: the field of Hello that differs.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class SetupError(SSDError):
    """The process cannot start."""


class SettingsError(SetupError):
    """An unknown key or a value out of bounds."""


class ModelNotFoundError(SetupError):
    """No such folder, or no config in it."""


class HubError(SetupError):
    """The hub does not respond, and the model is not local; a retry can succeed."""


class CacheError(SetupError):
    """The model cache is full; a retry succeeds once there is room."""


class UnsupportedModelError(SetupError):
    """A family or feature that the engine does not support."""


class WeightsError(SetupError):
    """A missing, surplus, truncated or misshapen tensor."""


class TokenizerError(SetupError):
    """The tokenizer is missing, or target and draft have different ones."""


class MemoryBudgetError(SetupError):
    """The KV cache cannot hold one sequence of maximum length."""


class AddressError(SetupError):
    """A port is in use, or an address cannot be bound."""

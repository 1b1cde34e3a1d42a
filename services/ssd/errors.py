"""The error tree. ``rpc/status.py`` maps each leaf to a gRPC code, an HTTP status and details.

    SSDError
    ├── RequestError              the caller's input; the request fails alone
    │   ├── FieldError            a field is out of range; ``field`` names it
    │   ├── ContextLengthError    prompt + new tokens exceed the model's length
    │   ├── UnknownModelError     no such model is served
    │   └── UnsupportedError      declared, not served yet; ``field`` names it
    ├── OverloadedError           a bound is reached; try again after ``retry_after_seconds``
    ├── NotReadyError             loading or draining
    │   └── IncompleteTextError   a client's: the target went away in the middle of an answer
    ├── AccessError               no or wrong credentials
    ├── CancelledError            the request was cancelled by its caller or a drain
    │   └── DeadlineError         its deadline passed
    ├── NotFiniteError            the model computed NaN or infinity for one sequence
    ├── InternalError             a server's own fault, as its client sees it
    ├── LinkError                 a target-draft link; costs speed, never a token
    │   ├── FrameError            malformed or oversize rows
    │   └── HandshakeError        the peers do not fit; ``field`` names the reason
    └── SetupError                the process cannot start
        ├── SettingsError         an unknown key or a value out of bounds
        ├── ModelNotFoundError    no such folder, or no config in it
        ├── HubError              the hub does not answer, and the model is not here
        ├── CacheError            the model cache has no room
        ├── UnsupportedModelError a family or feature that the engine does not run
        ├── WeightsError          a missing, surplus, truncated or misshapen tensor
        ├── TokenizerError        no tokenizer, or the pair's tokenizers differ
        ├── MemoryBudgetError     the KV cache cannot hold one sequence
        └── AddressError          a port is in use or an address cannot be bound

A message holds the number found, the number allowed, and the cure.
"""


class SSDError(Exception):
    """Base of all errors that this product raises on purpose."""


class RequestError(SSDError):
    """The caller's input is at fault; the request fails alone."""


class FieldError(RequestError):
    """A field of a request is out of range.

    Attributes:
        field: path of the field, as in the proto (``sampling.temperature``).
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class ContextLengthError(RequestError):
    """Prompt and new tokens together exceed the model's length.

    Attributes:
        field: path of the field that holds the prompt.
    """

    def __init__(
        self, prompt_tokens: int, max_tokens: int, max_model_len: int, field: str = "input"
    ) -> None:
        super().__init__(
            f"prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together "
            f"{prompt_tokens + max_tokens}, over max_model_len {max_model_len}; shorten either"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.field = field


class UnknownModelError(RequestError):
    """No such model is served."""


class UnsupportedError(RequestError):
    """A field or method that is declared but not served yet.

    Attributes:
        field: path of the field or name of the method.
    """

    def __init__(self, field: str, message: str = "not served by this version") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class OverloadedError(SSDError):
    """A bound is reached; nothing was taken on."""

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NotReadyError(SSDError):
    """The process is loading or draining."""


class IncompleteTextError(NotReadyError):
    """The target went away after the first token of an answer; only clients raise it."""


class AccessError(SSDError):
    """No or wrong credentials, or not allowed."""


class CancelledError(SSDError):
    """The request was cancelled by its caller or by a drain."""


class DeadlineError(CancelledError):
    """The deadline of a call passed before its end."""


class NotFiniteError(SSDError):
    """The model computed NaN or infinity for one sequence; the request fails alone."""


class InternalError(SSDError):
    """The server failed by a fault of its own; its log says more under the request id."""


class LinkError(SSDError):
    """A target-draft link failed; it costs speed and never a token."""


class FrameError(LinkError):
    """A frame is malformed, oversize or of another version."""


class HandshakeError(LinkError):
    """The two ends of a link do not fit.

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
    """The hub does not answer, and the model has not been fetched; later it may."""


class CacheError(SetupError):
    """The model cache has no room; somebody may make some."""


class UnsupportedModelError(SetupError):
    """A family or feature that the engine does not run."""


class WeightsError(SetupError):
    """A missing, surplus, truncated or misshapen tensor."""


class TokenizerError(SetupError):
    """No tokenizer, or the tokenizers of target and draft differ."""


class MemoryBudgetError(SetupError):
    """The KV cache cannot hold one sequence of maximum length."""


class AddressError(SetupError):
    """A port is in use, or an address cannot be bound."""

"""Whether torch.compile can generate kernels on this machine."""

from shutil import which

from ssd.errors import SettingsError


def has_c_compiler() -> bool:
    """Return whether there is a C compiler, with which Triton builds the launchers of kernels."""
    return which("cc") is not None or which("gcc") is not None


def require_compiler(device: str, setting: str, alternative: str) -> None:
    """Check what generated kernels need. Without CUDA, no kernels are generated.

    Args:
        device: of the passes.
        setting: what generates kernels.
        alternative: what to do without a compiler.

    Raises:
        SettingsError: the device has CUDA, and there is no C compiler.
    """
    if device.startswith("cuda") and not has_c_compiler():
        raise SettingsError(
            f"{setting} needs a C compiler, and there is neither cc nor gcc; install one, or "
            f"{alternative}"
        )

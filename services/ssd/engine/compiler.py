"""Whether torch.compile can generate kernels on this machine."""

from shutil import which

from ssd.errors import SettingsError


def has_c_compiler() -> bool:
    """Return whether there is a C compiler, with which Triton builds the launchers of kernels."""
    return which("cc") is not None or which("gcc") is not None


def require_compiler(device: str) -> None:
    """Check what compiled layers need. Without CUDA, no kernels are generated.

    Raises:
        SettingsError: the device has CUDA, and there is no C compiler.
    """
    if device.startswith("cuda") and not has_c_compiler():
        raise SettingsError(
            "compile_layers needs a C compiler, and there is neither cc nor gcc; install one, or "
            "set it to false"
        )

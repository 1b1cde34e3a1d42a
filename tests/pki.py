"""A certificate authority for tests, and files that are replaced as the kubelet replaces them."""

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ssd.rpc.credentials import TlsFiles


class Authority:
    """Signs certificates of a day, or of ``days``."""

    def __init__(self, name: str = "authority") -> None:
        self.days = 1
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraint = x509.BasicConstraints(ca=True, path_length=None)
        self.pem = self._sign(self._name, self._key.public_key(), constraint)

    def issue(self, *names: str) -> tuple[bytes, bytes]:
        """Certificate and key, with these subject alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "leaf")])
        sans = x509.SubjectAlternativeName(list(map(_general_name, names)))
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return self._sign(subject, key.public_key(), sans), secret

    def files(self, folder: Path, *names: str) -> TlsFiles:
        """Write ``tls.crt``, ``tls.key`` and ``ca.crt`` as a Secret has them."""
        folder.mkdir(exist_ok=True)
        certificate, key = self.issue(*names)
        return TlsFiles(
            certificate=put(folder / "tls.crt", certificate),
            key=put(folder / "tls.key", key),
            ca=put(folder / "ca.crt", self.pem),
        )

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType
    ) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(issuer_name=self._name, subject_name=subject, public_key=key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=self.days))
            .add_extension(extension, critical=False)
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def put(path: Path, content: bytes | str) -> str:
    """Replace a file in one step; returns its path."""
    new = path.with_suffix(".new")
    new.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(new, path)  # noqa: PTH105 - the step is the point
    return str(path)


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)

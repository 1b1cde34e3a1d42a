"""The end of the validity of a certificate, from its bytes.

*Decision*: the four elements of DER before it are skipped here. *Because*: the public functions of
``ssl`` decode only certificates of authorities and of verified peers. *Not chosen*: the package
``cryptography``, 15 MB in every image for one time. *Revisit when* a process needs another field.

Source: RFC 5280, section 4.1; X.690, section 8.1.
"""

import base64
import re
from datetime import UTC, datetime

# The names that OpenSSL reads.
_PEM = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]+)-----END")
_VERSION, _UTC_TIME = 0xA0, 0x17
_LONG = 0x80
"""Bit of a length whose other bits are the number of bytes of the length."""


def expiry_of(pem: bytes) -> float:
    """Return the end of the validity of the first certificate, in seconds since the epoch.

    Args:
        pem: a chain that OpenSSL has read.

    Raises:
        ValueError: it contains no certificate.
    """
    block = _PEM.search(pem)
    if block is None:
        raise ValueError("no certificate in the form of PEM")
    _, certificate, _ = _element(base64.b64decode(block[1]))
    _, fields, _ = _element(certificate)
    tag, _, rest = _element(fields)
    # The version is optional, and the serial number follows it.
    num_skipped = 3 if tag == _VERSION else 2
    for _ in range(num_skipped):
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest)
    _, _, rest = _element(validity)
    tag, not_after, _ = _element(rest)
    return _seconds(not_after.decode("ascii"), has_century=tag != _UTC_TIME)


def _element(content: bytes) -> tuple[int, bytes, bytes]:
    """Return tag and content of the first element, and the bytes after it."""
    tag, length, start = content[0], content[1], 2
    if length & _LONG:
        start += length - _LONG
        length = int.from_bytes(content[2:start])
    return tag, content[start : start + length], content[start + length :]


def _seconds(text: str, *, has_century: bool) -> float:
    """Convert ``YYMMDDhhmmssZ``, or ``YYYYMMDDhhmmssZ``; years of two digits are 1950 to 2049."""
    if not has_century:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()

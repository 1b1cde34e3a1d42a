"""The end of the validity of certificates, compared with ``cryptography``."""

from datetime import UTC, datetime

import pytest
from cryptography import x509
from hypothesis import example, given
from hypothesis import strategies as st
from tests.pki import Authority

from ssd.rpc.certificate import expiry_of

AUTHORITY = Authority()
DAYS = (datetime(9999, 12, 31, tzinfo=UTC) - datetime.now(UTC)).days


@example(0, "a")
# Years from 2050 have another form than those before.
@given(days=st.integers(0, 40 * 365) | st.integers(0, DAYS), name=st.sampled_from(["a", "b" * 200]))
def test_the_end_is_that_of_the_first_certificate(days: int, name: str) -> None:
    AUTHORITY.days = days
    certificate, key = AUTHORITY.issue(*[name[:60]] * 20)
    expected = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    AUTHORITY.days = 1
    other, _ = AUTHORITY.issue("c")
    chain = b"a text\r\n" + key + certificate.replace(b"\n", b"\r\n") + other
    assert expiry_of(chain) == expected.timestamp()
    assert expiry_of(chain.replace(b" CERTIFICATE-", b" X509 CERTIFICATE-")) == expected.timestamp()


def test_a_text_without_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="no certificate"):
        expiry_of(b"x")

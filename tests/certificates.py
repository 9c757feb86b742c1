"""Certificate authorities for tests."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_ADDRESSES = (x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")))


class Certificate(NamedTuple):
    cert: Path
    key: Path


class Authority:
    """A CA with its files in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(self._name, self._name, self._key, days=10)
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        certificate = builder.add_extension(constraints, critical=True).sign(self._key, hashes.SHA256())
        self.ca = self._folder / "ca.pem"
        self.ca.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str, *, days: int = 5) -> Certificate:
        """A certificate for localhost, in files of that name; it ends in `days`, or ended before."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(subject, self._name, key, days=days)
        addresses = x509.SubjectAlternativeName(_ADDRESSES)
        certificate = builder.add_extension(addresses, critical=False).sign(self._key, hashes.SHA256())
        files = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        files.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return files


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=20))
        .not_valid_after(now + datetime.timedelta(days=days))
    )

"""Keys and certificates of a deployment: the coordinator's authority and server, a site's key and its request."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from pathlib import Path

from perfed.errors import ConfigError
from perfed.flower.extra import require

require("cryptography")

from cryptography import x509  # noqa: E402
from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: E402

YEARS = 10
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def checked_name(name: str) -> str:
    """A site's name, if certificates and file names can carry it."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"name = {name[:80]!r} is not accepted.", "Use letters, digits, '-', '_' and '.'.")
    return name


def write_secret(path: Path, content: bytes) -> None:
    """Write a file for its owner's eyes only; an existing one is not touched."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise ConfigError(f"{path} is already there.", "Give another directory, or remove it.") from None


def make_authority(directory: Path, hosts: list[str]) -> None:
    """An authority of the coordinator's own, and a server certificate for these host names and addresses."""
    ca, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    name = _name("perfed coordinator")
    usage = _usage(sign=True)
    authority = (
        _certificate(name, name, ca.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca.public_key()), critical=False)
        .sign(ca, hashes.SHA384())
    )
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key())
    certificate = (
        _certificate(_name(hosts[0]), name, server.public_key())
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(ca, hashes.SHA384())
    )
    write_secret(directory / "ca.key", _private(ca))
    write_secret(directory / "server.key", _private(server))
    (directory / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    (directory / "server.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def make_site_key(directory: Path, name: str) -> None:
    """A site's key, as Flower reads it, and a request signed with it that the coordinator admits the site by."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    write_secret(directory / "key", private)
    request = x509.CertificateSigningRequestBuilder().subject_name(_name(name)).sign(key, hashes.SHA384())
    (directory / f"{name}.csr").write_bytes(request.public_bytes(serialization.Encoding.PEM))


def read_request(path: Path) -> tuple[str, bytes]:
    """The name and the public key of a site's request, if whoever made it has the key."""
    try:
        request = x509.load_pem_x509_csr(path.read_bytes())
        names = [str(part.value) for part in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key = request.public_key()
        good = request.is_signature_valid and isinstance(key, ec.EllipticCurvePublicKey) and len(names) == 1
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no request of a site: {error}.", "Make it by perfed site init.") from None
    if not good:
        raise ConfigError(f"{path} is not signed with its own key.", "Make it by perfed site init.")
    public = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return checked_name(names[0]), public


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _usage(*, sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=sign,
        crl_sign=sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=10))
        .not_valid_after(now + datetime.timedelta(days=365 * YEARS))
    )

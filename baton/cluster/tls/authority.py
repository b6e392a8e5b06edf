"""A private certificate authority: makes itself, issues short-lived certificates, renews them.

Owns the files: keys are readable by their owner only, and every file is replaced as a whole. A
certificate is for one role; only workers can be servers. Elliptic curve P-256 throughout.
"""

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.cluster.errors import BatonError, SettingsError
from baton.cluster.tls.folder import CA, CERT, KEY
from baton.cluster.tls.peers import ROLES, SPIFFE, named_role

CA_KEY = "ca.key"
SERVERS = ("prefill", "decode", "gateway", "redis")
_SKEW = timedelta(minutes=5)
"""Clocks of other machines may be behind."""


@dataclass(frozen=True)
class Order:
    """What a certificate is to say."""

    role: str
    hosts: tuple[str, ...]
    life: timedelta


@dataclass(frozen=True)
class Issued:
    """What a certificate says."""

    order: Order
    begins: datetime
    ends: datetime
    serial: int
    issuer: str

    @property
    def due(self) -> datetime:
        """When a third of its life is left."""
        return self.ends - self.order.life / 3

    def is_due(self, now: datetime) -> bool:
        return now >= self.due


def create(folder: Path, life: timedelta) -> None:
    """An authority in `folder`, which nobody else may enter. Raises BatonError if one is there."""
    if (folder / CA_KEY).exists():
        raise BatonError(f"There is an authority in {folder} already.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"Baton cluster {os.urandom(4).hex()}")
    certificate = (
        _builder(name, name, key.public_key(), life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _replace(folder / CA_KEY, _key_pem(key), 0o600)
    _replace(folder / CA, certificate.public_bytes(Encoding.PEM), 0o644)


def issue(authority: Path, folder: Path, order: Order) -> None:
    """Writes the three files of a process to `folder`. Raises SettingsError, BatonError."""
    _check(order)
    ca_key, ca = _authority(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if order.role in SERVERS:
        usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(SPIFFE + order.role)]
    names += [_general_name(host) for host in order.hosts]
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(_public(ca))
    certificate = (
        _builder(_name(f"baton {order.role}"), ca.subject, key.public_key(), order.life)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer_id, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A reader in between sees a key without its certificate, and keeps what it had.
    _replace(folder / KEY, _key_pem(key), 0o600)
    _replace(folder / CERT, certificate.public_bytes(Encoding.PEM), 0o644)
    _replace(folder / CA, (authority / CA).read_bytes(), 0o644)


def renew(authority: Path, folder: Path, *, always: bool = False) -> bool:
    """The same certificate with a new key and a new life, if it is due. True when it was."""
    found = read(folder)
    if not always and not found.is_due(datetime.now(UTC)):
        return False
    issue(authority, folder, found.order)
    return True


def publish(certificate: Path, to: Path) -> None:
    """A copy for whoever may enter the folder of `to`, replaced only where it differs."""
    content = certificate.read_bytes()
    if not to.exists() or to.read_bytes() != content:
        _replace(to, content, 0o644)


def read(folder: Path) -> Issued:
    """Raises BatonError when there is no certificate of ours."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / CERT).read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise BatonError(f"There is no certificate of Baton in {folder}: {error}") from error
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    role = named_role(uris)
    hosts = (
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    )
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    order = Order(role, hosts, ends - begins - _SKEW)
    issuer = certificate.issuer.rfc4514_string()
    return Issued(order, begins, ends, certificate.serial_number, issuer)


def _check(order: Order) -> None:
    if order.role not in ROLES:
        raise SettingsError(f"--role must be one of {', '.join(ROLES)}, not {order.role!r}.")
    if "" in order.hosts or (order.role in SERVERS and not order.hosts):
        raise SettingsError("--host must name at least one host: others check it when they call.")
    if order.life <= timedelta(0):
        raise SettingsError("The life of a certificate must be positive.")


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = load_pem_private_key((folder / CA_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
    except (OSError, ValueError) as error:
        raise BatonError(
            f"There is no authority in {folder} ({error}); `baton certs init` makes one."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BatonError(f"The key of the authority in {folder} is of another kind than P-256.")
    return key, certificate


def _public(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, life: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        message = f"--host must be an address or a name in ASCII (punycode), not {host!r}."
        raise SettingsError(message) from error


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Whole or not at all, and never readable by others than `mode` says."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(fresh, path)

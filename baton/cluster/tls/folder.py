"""What a process proves itself with: `ca.crt`, `tls.crt` and `tls.key` in one folder.

The names are those of a Kubernetes TLS secret. Files that are replaced count from the next
handshake on, without a restart; ones that do not fit together are told once and left alone, for
they may be half written. Safe from any thread: gRPC asks from its own.
"""

import logging
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from baton.cluster.errors import SettingsError
from baton.cluster.tls.peers import named_role

CA, CERT, KEY = "ca.crt", "tls.crt", "tls.key"
_log = logging.getLogger(__name__)
_Stamp = tuple[tuple[int, int, int] | None, ...]


class Material(NamedTuple):
    """PEM texts: trusted authorities, own certificate, its key."""

    ca: bytes
    cert: bytes
    key: bytes


class TlsFolder:
    """`server_name`: what certificates of workers are checked for, in place of their host.
    Raises SettingsError when the files are not there, do not fit or have expired."""

    def __init__(self, path: Path, server_name: str | None = None) -> None:
        self.server_name = server_name
        self._path = path
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._material = _read(path)

    def latest(self) -> Material:
        """The same object for as long as nothing has changed."""
        with self._lock:
            stamp = self._stamp_now()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._material = _read(self._path)
                    _log.info("tls=%s new certificate", self._path)
                except SettingsError as error:
                    _log.warning("tls=%s the old certificate stays: %s", self._path, error)
            return self._material

    @property
    def role(self) -> str:
        """That its certificate names; empty for none."""
        certificate = x509.load_pem_x509_certificate(self.latest().cert)
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        except x509.ExtensionNotFound:
            return ""
        return named_role(names.value.get_values_for_type(x509.UniformResourceIdentifier))

    def server_credentials(self) -> grpc.ServerCredentials:
        """Whoever connects must show a certificate of our authorities.

        Source: https://grpc.github.io/grpc/python/grpc.html#grpc.dynamic_ssl_server_credentials
        """
        given = self.latest()

        def fetch() -> Any:  # None: as before
            nonlocal given
            material = self.latest()
            if material is given:
                return None
            given = material
            return _server_configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(given), fetch, require_client_authentication=True
        )

    def _stamp_now(self) -> _Stamp:
        return tuple(_stamp(self._path / name) for name in (CA, CERT, KEY))


def open_tls(path: Path | None, server_name: str | None = None) -> TlsFolder | None:
    """None without a folder: no TLS."""
    return TlsFolder(path, server_name) if path is not None else None


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _server_configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    pair = [(material.key, material.cert)]
    return grpc.ssl_server_certificate_configuration(pair, material.ca)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> Material:
    try:
        material = Material(*((path / name).read_bytes() for name in (CA, CERT, KEY)))
    except OSError as error:
        raise SettingsError(
            f"--tls-dir {path} must hold {CA}, {CERT} and {KEY}: {error.strerror}"
            f" ({error.filename}). `baton certs issue` makes them."
        ) from error
    try:
        x509.load_pem_x509_certificates(material.ca)
        certificate = x509.load_pem_x509_certificate(material.cert)
        key = load_pem_private_key(material.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"--tls-dir {path} holds a file that is not PEM: {error}") from error
    if key.public_key() != certificate.public_key():
        raise SettingsError(f"--tls-dir {path}: {KEY} is not the key of {CERT}.")
    if certificate.not_valid_after_utc <= datetime.now(UTC):
        ended = certificate.not_valid_after_utc
        raise SettingsError(f"--tls-dir {path}: the certificate has expired on {ended:%F %T} UTC.")
    return material

"""The run's authority: its files, what its certificates say, and how a newcomer comes to believe it."""

from __future__ import annotations

import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from coordinator.authority import Authority, ServerCertificate, open_authority, write_operator
from protocol.errors import ErrorCode, HetnodeError
from protocol.trust.names import (
    COORDINATOR_NAME,
    COORDINATOR_URI,
    ENROLLMENT_NAME,
    OPERATOR_URI,
    identity_of,
    peer_of,
    peer_uri,
    tls_name,
)
from protocol.trust.tls import authority_of, certified_peer, tls_key_from_der
from tests.builders import keyed
from tests.support.coordinator_process import new_key, spki

A = keyed(0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return open_authority(tmp_path, "run-1")


def names_of(pem: bytes) -> tuple[list[str], list[str]]:
    """DNS names and URIs."""
    extensions = x509.load_pem_x509_certificate(pem).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return (
        names.get_values_for_type(x509.DNSName),
        names.get_values_for_type(x509.UniformResourceIdentifier),
    )


def der_of(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def test_the_authority_is_the_same_after_a_restart(tmp_path: Path, authority: Authority) -> None:
    assert open_authority(tmp_path, "run-1").pem == authority.pem
    assert open_authority(tmp_path, "run-1").pin == authority.pin


def test_only_the_owner_can_read_private_keys_whatever_their_former_mode(tmp_path: Path) -> None:
    open_authority(tmp_path, "run-1")
    (tmp_path / "authority.key").chmod(0o644)
    write_operator(open_authority(tmp_path, "run-1"), tmp_path)
    for name in ("authority.key", "operator.key", "operator.pem"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("damage", ["other certificate", "no certificate", "no key in it"])
def test_an_authority_that_is_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    folder, other = tmp_path / "a", tmp_path / "b"
    for place in (folder, other):
        place.mkdir()
        open_authority(place, "run-1")
    match damage:
        case "other certificate":
            (folder / "authority.pem").write_bytes((other / "authority.pem").read_bytes())
        case "no certificate":
            (folder / "authority.pem").unlink()
        case _:
            (folder / "authority.key").write_text("no key")
    with pytest.raises(HetnodeError) as error:
        open_authority(folder, "run-1")
    assert error.value.code is ErrorCode.STORE_CORRUPT


def test_each_certificate_names_only_its_holder(authority: Authority) -> None:
    key = new_key().public_key()
    assert names_of(authority.for_peer(A.peer, key)) == ([tls_name(A.peer)], [peer_uri(A.peer)])
    assert names_of(authority.for_coordinator(key)) == (
        [COORDINATOR_NAME, ENROLLMENT_NAME],
        [COORDINATOR_URI],
    )
    assert names_of(authority.for_operator(key)) == ([], [OPERATOR_URI])


def test_only_peers_may_be_at_both_ends(authority: Authority) -> None:
    key = new_key().public_key()

    def usages(pem: bytes) -> set[x509.ObjectIdentifier]:
        extensions = x509.load_pem_x509_certificate(pem).extensions
        return set(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)

    assert usages(authority.for_coordinator(key)) == {ExtendedKeyUsageOID.SERVER_AUTH}
    assert usages(authority.for_operator(key)) == {ExtendedKeyUsageOID.CLIENT_AUTH}
    assert len(usages(authority.for_peer(A.peer, key))) == 2


def test_the_servers_certificate_is_replaced_when_half_of_its_life_is_over(tmp_path: Path) -> None:
    now = 1e9
    certificate = ServerCertificate(open_authority(tmp_path, "run-1", 100.0, lambda: now))
    first = certificate.pair()
    now += 49.0
    assert certificate.pair() == first
    now += 2.0
    second = certificate.pair()[1]
    assert second != first[1]
    assert x509.load_pem_x509_certificate(second).not_valid_after_utc.timestamp() == now + 100.0


def test_a_newcomer_finds_the_authority_in_the_servers_certificate_by_its_pin(authority: Authority) -> None:
    leaf = der_of(authority.for_coordinator(new_key().public_key()))
    assert authority_of(leaf, authority.pin) == authority.certificate


def test_another_authority_is_not_believed(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = open_authority(tmp_path / "other", "run-1")
    for leaf in (
        der_of(other.for_coordinator(new_key().public_key())),
        der_of(authority.for_peer(A.peer, new_key().public_key())),
        der_of(authority.pem),
    ):
        with pytest.raises(HetnodeError) as error:
            authority_of(leaf, authority.pin)
        assert error.value.code is ErrorCode.WRONG_AUTHORITY


@given(st.binary(max_size=200))
def test_any_other_bytes_are_no_certificate_of_an_authority(data: bytes) -> None:
    with pytest.raises(HetnodeError) as error:
        authority_of(data, bytes(32))
    assert error.value.code is ErrorCode.WRONG_AUTHORITY


@given(st.data())
def test_a_certificate_with_flipped_bits_raises_nothing_else(data: st.DataObject) -> None:
    leaf = bytearray(LEAF)
    for at in data.draw(st.lists(st.integers(0, len(leaf) - 1), min_size=1, max_size=4)):
        leaf[at] ^= data.draw(st.integers(1, 255))
    with suppress(HetnodeError):
        assert authority_of(bytes(leaf), PIN) == FIXED.certificate


@given(st.binary(max_size=300))
def test_bytes_that_are_no_key_raise_only_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="public key"):
        tls_key_from_der(data)


def test_a_key_of_p256_is_read_and_one_of_another_kind_is_not() -> None:
    key = new_key()
    assert tls_key_from_der(spki(key)) == key.public_key()
    ed25519 = A.key.public_key()
    with pytest.raises(ValueError, match="another kind"):
        tls_key_from_der(ed25519.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


class Context:
    def __init__(self, *uris: bytes) -> None:
        self._uris = uris

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {"peer_uri": self._uris} if self._uris else {}


def test_a_caller_is_named_by_the_one_uri_of_its_certificate() -> None:
    assert identity_of(Context(peer_uri(A.peer).encode())) == peer_uri(A.peer)
    assert identity_of(Context()) == ""
    assert identity_of(Context(b"hetnode:operator", b"hetnode:peer:x")) == ""
    assert peer_of(peer_uri(A.peer)) == A.peer
    assert peer_of(OPERATOR_URI) is None


def _fixed() -> Authority:
    with tempfile.TemporaryDirectory() as folder:
        return open_authority(Path(folder), "run-1")


FIXED = _fixed()
LEAF = der_of(FIXED.for_coordinator(new_key().public_key()))
PIN = FIXED.pin


def test_a_certificate_of_an_unknown_version_is_refused(authority: Authority) -> None:
    pem = authority.for_peer(A.peer, new_key().public_key())
    good = x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)
    assert certified_peer(good, authority.certificate).peer == A.peer
    version = bytes.fromhex("a003020102")
    assert good.count(version) == 1
    bad = good.replace(version, bytes.fromhex("a003020140"))
    with pytest.raises(ValueError, match="version"):
        certified_peer(bad, authority.certificate)
    with pytest.raises(HetnodeError) as refusal:
        authority_of(bad, authority.pin)
    assert refusal.value.code is ErrorCode.WRONG_AUTHORITY

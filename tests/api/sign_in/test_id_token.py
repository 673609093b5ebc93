"""ID tokens: one that is not exactly what was asked for proves nothing."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from oidc_provider import SigningKey

from api.sign_in.provider import (
    CLOCKS_DIFFER_S,
    Expected,
    InvalidToken,
    UnknownSigningKey,
    key_set,
    verified_claims,
)

EXPECTED = Expected("https://issuer.example", "trivet", "the-nonce")
KEY, OTHER = SigningKey("first"), SigningKey("second")
KEYS = key_set({"keys": [KEY.public]})


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    own = {"iss": EXPECTED.issuer, "sub": "1", "aud": "trivet", "iat": now, "exp": now + 300, "nonce": "the-nonce"}
    return {name: value for name, value in (own | changes).items() if value is not None}


def unsigned(header: dict[str, Any], payload: dict[str, Any], signature: str = "") -> str:
    encoded = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode() for each in (header, payload)]
    return ".".join([*encoded, signature])


def test_a_token_as_it_was_asked_for_is_accepted() -> None:
    assert verified_claims(KEY.sign(claims(groups=["a"])), KEYS, EXPECTED)["groups"] == ["a"]
    assert verified_claims(KEY.sign(claims(aud=["trivet"])), KEYS, EXPECTED)["sub"] == "1"
    assert verified_claims(KEY.sign(claims(aud=["other", "trivet"], azp="trivet")), KEYS, EXPECTED)["sub"] == "1"


NOW = int(time.time())
WRONG: dict[str, dict[str, Any]] = {
    "another issuer": {"iss": "https://other.example"},
    "the issuer with a slash": {"iss": "https://issuer.example/"},
    "another audience": {"aud": "other"},
    "several audiences, and not for us": {"aud": ["trivet", "other"], "azp": "other"},
    "several audiences, and for nobody": {"aud": ["trivet", "other"]},
    "one audience, for another client": {"azp": "other"},
    "expired": {"exp": NOW - CLOCKS_DIFFER_S - 60, "iat": NOW - 1000},
    "from the future": {"iat": NOW + 100_000, "exp": NOW + 200_000},
    "not yet": {"nbf": NOW + 100_000, "exp": NOW + 200_000},
    "another nonce": {"nonce": "another"},
    "no nonce": {"nonce": None},
    "no end": {"exp": None},
    "no time": {"iat": None},
    "no subject": {"sub": None},
    "no audience": {"aud": None},
    "no issuer": {"iss": None},
    "an end that is no number": {"exp": "soon"},
    "a subject that is no text": {"sub": 7},
}


@pytest.mark.parametrize("changes", WRONG.values(), ids=WRONG)
def test_a_wrong_claim_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidToken):
        verified_claims(KEY.sign(claims(**changes)), KEYS, EXPECTED)


def test_clocks_may_differ_a_little() -> None:
    now = int(time.time())
    assert verified_claims(KEY.sign(claims(exp=now - CLOCKS_DIFFER_S + 30, iat=now - 300)), KEYS, EXPECTED)


def test_another_signature_is_refused() -> None:
    forged, unnamed = SigningKey("first"), jwt.encode(claims(), KEY.private, algorithm="ES256")
    with pytest.raises(InvalidToken, match="not valid"):
        verified_claims(forged.sign(claims()), KEYS, EXPECTED)
    with pytest.raises(UnknownSigningKey):
        verified_claims(OTHER.sign(claims()), KEYS, EXPECTED)
    with pytest.raises(UnknownSigningKey):
        verified_claims(unnamed, key_set({"keys": [KEY.public, OTHER.public]}), EXPECTED)
    assert verified_claims(unnamed, KEYS, EXPECTED)


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "", 7, None])
def test_a_token_without_a_signature_of_the_provider_is_refused(algorithm: Any) -> None:
    with pytest.raises(InvalidToken):
        verified_claims(unsigned({"alg": algorithm, "kid": "first"}, claims()), KEYS, EXPECTED)


def test_the_public_key_is_no_shared_secret() -> None:
    """The public key's text as the secret of an HMAC, which fooled libraries that let the token choose."""
    text = KEY.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    secret = base64.urlsafe_b64encode(text).decode()
    with pytest.raises(InvalidToken, match="not accepted"):
        verified_claims(jwt.encode(claims(), secret, algorithm="HS256", headers={"kid": "first"}), KEYS, EXPECTED)


def test_a_key_is_used_for_its_own_algorithm_only() -> None:
    keys = key_set({"keys": [{**KEY.public, "alg": "ES384"}]})
    with pytest.raises(InvalidToken, match="another algorithm"):
        verified_claims(KEY.sign(claims()), keys, EXPECTED)


def test_keys_that_are_not_for_signatures_are_left_out() -> None:
    odd = [{**KEY.public, "use": "enc"}, {"kty": "oct", "k": "AAAA"}, "x", None]
    assert key_set({"keys": odd}) == {}
    assert key_set({"keys": "x"}) == key_set({}) == {}
    with pytest.raises(InvalidToken):
        verified_claims(KEY.sign(claims()), {"first": {"kty": "EC", "crv": "P-256"}}, EXPECTED)


@given(st.text(max_size=60) | st.text("abcXYZ._-=019", max_size=200))
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidToken):
        verified_claims(text, KEYS, EXPECTED)


@given(st.data())
def test_a_token_is_refused_when_any_character_of_it_is_changed(data: st.DataObject) -> None:
    token = KEY.sign(claims())
    place = data.draw(st.integers(0, len(token) - 2))  # the last one has bits that stand for nothing
    replaced = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"))
    changed = token[:place] + replaced + token[place + 1 :]
    if changed != token:
        with pytest.raises(InvalidToken):
            verified_claims(changed, KEYS, EXPECTED)

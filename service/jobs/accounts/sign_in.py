"""Maps the claims of OpenID Connect to a person: an owner, with a project and scopes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.jobs.accounts.projects import PROJECT_PATTERN, ROLES, SCOPES, Scope

OPERATOR = "operator"
EVERYBODY = "*"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")


class NotAdmitted(Exception):  # noqa: N818
    """The provider knows this person, but this service has no role for them."""


@dataclass(frozen=True)
class SignInRule:
    """Gives the members of a group a role in a project; an operator's ``project`` is ``None``."""

    group: str
    project: str | None
    scope: Scope


@dataclass(frozen=True)
class Person:
    """Who signed in. ``id`` is that of one subject of one issuer, for ever; ``name`` owns jobs."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    project: str | None


def parse_rules(text: str) -> tuple[SignInRule, ...]:
    """Return the rules of ``GROUP=PROJECT:ROLE; GROUP=operator; *=PROJECT:ROLE``. Raises :class:`ValueError`."""
    return tuple(_parse_rule(part.strip()) for part in text.split(";") if part.strip())


def _parse_rule(text: str) -> SignInRule:
    group, equals, grant = (part.strip() for part in text.rpartition("="))
    if not (equals and group):
        raise ValueError(f"{text!r} is not a rule; one looks like GROUP=PROJECT:ROLE or GROUP={OPERATOR}")
    if grant == OPERATOR:
        return SignInRule(group, None, "admin")
    project, _, role = grant.partition(":")
    if re.fullmatch(PROJECT_PATTERN, project) is None:
        raise ValueError(f"{project!r} in {text!r} is not the name of a project, nor is it '{OPERATOR}'")
    if role not in ROLES:
        raise ValueError(f"{role!r} in {text!r} is not a role; there are {', '.join(ROLES)}")
    return SignInRule(group, project, SCOPES[ROLES.index(role)])


def person_of(claims: Mapping[str, Any], rules: Sequence[SignInRule], *, owner_claim: str, groups_claim: str) -> Person:
    """Return the person of a verified ID token's claims. The first rule that matches one of the person's groups counts.

    Raises :class:`NotAdmitted`.
    """
    groups = _groups(claims.get(groups_claim))
    rule = next((rule for rule in rules if rule.group in groups or rule.group == EVERYBODY), None)
    if rule is None:
        raise NotAdmitted("none of your groups has a role here (TRIVET_OIDC_ROLES)")
    subject = hashlib.sha256(f"{claims['iss']}\0{claims['sub']}".encode()).hexdigest()[:32]
    return Person(f"oidc-{subject}", _owner(claims, owner_claim), (rule.scope,), rule.project)


def _owner(claims: Mapping[str, Any], claim: str) -> str:
    name = claims.get(claim)
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise NotAdmitted(f"the claim '{claim}' is missing, or no name that can own jobs (TRIVET_OIDC_OWNER_CLAIM)")
    if claim == "email" and claims.get("email_verified") is not True:
        raise NotAdmitted("the provider has not verified your email address")
    return name


def _groups(claim: object) -> frozenset[str]:
    listed = claim if isinstance(claim, list) else [claim]
    return frozenset(group for group in listed if isinstance(group, str))

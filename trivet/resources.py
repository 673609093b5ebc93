"""Provides the client's calls for operators: keys, service accounts, the audit log and projects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

from service.jobs.accounts import Project, ProjectDetails, Role, Scope
from service.jobs.records import ApiKey, ServiceAccount
from service.jobs.records.audit import AuditAction, AuditPage
from trivet.connection import Connection, lines_of


@dataclass(frozen=True)
class KeysResource:
    """API keys; needs an admin key."""

    _connection: Connection

    def create(
        self,
        name: str,
        scopes: Sequence[Scope] = ("read",),
        project: str | None = None,
        *,
        expires_at: datetime | None = None,
    ) -> tuple[ApiKey, str]:
        """Create a key of a project, or an operator's; return it and its secret, which is shown only once."""
        body = {"name": name, "scopes": list(scopes), "project": project, "expires_at": _iso(expires_at)}
        return _with_secret(self._connection.json("POST", "/v1/keys", json=body))

    def list(self) -> list[ApiKey]:
        return self._connection.listed(ApiKey, "/v1/keys")

    def rotate(
        self, key_id: str, *, grace_s: float | None = None, expires_at: datetime | None = None
    ) -> tuple[ApiKey, str]:
        """Create a successor of a key, which itself works for ``grace_s`` seconds more; return it and its
        secret.
        """
        body = {"grace_s": grace_s, "expires_at": _iso(expires_at)}
        given = {name: value for name, value in body.items() if value is not None}
        return _with_secret(self._connection.json("POST", f"/v1/keys/{quote(key_id, safe='')}/rotate", json=given))

    def revoke(self, key_id: str) -> None:
        self._connection.json("DELETE", f"/v1/keys/{quote(key_id, safe='')}")


def _with_secret(answer: Any) -> tuple[ApiKey, str]:
    return ApiKey.model_validate(answer), answer["secret"]


@dataclass(frozen=True)
class AccountsResource:
    """Service accounts; needs an admin key."""

    _connection: Connection

    def create(self, name: str, scopes: Sequence[Scope] = ("submit",), project: str | None = None) -> ServiceAccount:
        """Create an account of a project, or an operator's, without keys."""
        body = {"name": name, "scopes": list(scopes), "project": project}
        return ServiceAccount.model_validate(self._connection.json("POST", "/v1/accounts", json=body))

    def list(self) -> list[ServiceAccount]:
        return self._connection.listed(ServiceAccount, "/v1/accounts")

    def create_key(self, name: str, *, expires_at: datetime | None = None) -> tuple[ApiKey, str]:
        """Create a key of an account; return it and its secret, which is shown only once."""
        path = f"{_account(name)}/keys"
        return _with_secret(self._connection.json("POST", path, json={"expires_at": _iso(expires_at)}))

    def disable(self, name: str) -> ServiceAccount:
        """Stop all keys of an account at once."""
        return ServiceAccount.model_validate(self._connection.json("POST", f"{_account(name)}/disable"))

    def enable(self, name: str) -> ServiceAccount:
        """Let the keys of an account work again."""
        return ServiceAccount.model_validate(self._connection.json("POST", f"{_account(name)}/enable"))

    def delete(self, name: str) -> None:
        """Delete an account and revoke its keys."""
        self._connection.json("DELETE", _account(name))


def _account(name: str) -> str:
    return f"/v1/accounts/{quote(name, safe='')}"


@dataclass(frozen=True)
class AuditResource:
    """The audit log; needs an admin key."""

    _connection: Connection

    def page(self, *, limit: int | None = None, cursor: str | None = None, **wanted: Unpack[_AuditWanted]) -> AuditPage:
        """Return a page of entries, newest first."""
        params = {**_audit_params(wanted), "limit": limit, "cursor": cursor}
        return AuditPage.model_validate(self._connection.json("GET", "/v1/audit", params=params))

    def lines(self, **wanted: Unpack[_AuditWanted]) -> Iterator[str]:
        """Yield entries as JSON lines, oldest first, for :func:`service.jobs.records.audit.verify_chain`."""
        params = {**_audit_params(wanted), "format": "jsonl"}
        with self._connection.stream("/v1/audit", params=params) as response:
            yield from lines_of(response)


class _AuditWanted(TypedDict, total=False):
    since: datetime | None
    until: datetime | None
    actor: str | None
    action: AuditAction | None
    job: str | None


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _audit_params(wanted: _AuditWanted) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in wanted.items()}


@dataclass(frozen=True)
class ProjectsResource:
    """Projects. Only an operator's key makes, changes and deletes one; a maintainer's key may change its members."""

    connection: Connection

    def create(self, name: str, description: str = "") -> Project:
        body = {"name": name, "description": description}
        return Project.model_validate(self.connection.json("POST", "/v1/projects", json=body))

    def list(self) -> list[Project]:
        """List the key's project; an operator's key lists all."""
        return self.connection.listed(Project, "/v1/projects")

    def get(self, name: str) -> ProjectDetails:
        return ProjectDetails.model_validate(self.connection.json("GET", _project(name)))

    def change(self, name: str, **changes: Any) -> ProjectDetails:
        """Change a project's ``description``, whether it may run ``scripts``, or the given ones of its ``quotas``:
        ``None`` removes one.
        """
        return ProjectDetails.model_validate(self.connection.json("PATCH", _project(name), json=changes))

    def delete(self, name: str) -> None:
        """Delete a project that has no jobs, uploads, keys, accounts or webhooks."""
        self.connection.json("DELETE", _project(name))

    def set_member(self, name: str, owner: str, role: Role) -> ProjectDetails:
        """Give the owner of keys a role in a project."""
        return ProjectDetails.model_validate(
            self.connection.json("PUT", f"{_project(name)}/members/{quote(owner, safe='')}", json={"role": role})
        )

    def remove_member(self, name: str, owner: str) -> None:
        """End a membership at once."""
        self.connection.json("DELETE", f"{_project(name)}/members/{quote(owner, safe='')}")


def _project(name: str) -> str:
    return f"/v1/projects/{quote(name, safe='')}"

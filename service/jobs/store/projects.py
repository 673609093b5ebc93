"""Keeps projects, their members and their service accounts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import orjson

from service.jobs.accounts import (
    DEFAULT_PROJECT,
    PROJECT_PATTERN,
    Project,
    ProjectMember,
    ProjectUsage,
    Quotas,
    Role,
    Scope,
    parse_quotas,
)
from service.jobs.records import Conflict, NotFound, Problem, Rejected, ServiceAccount
from service.jobs.records.store_limits import StoreLimits
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.decode import json_of
from service.jobs.store.keys import ApiKeys, check_grant, project_of
from service.jobs.store.keyspace import (
    ACCOUNTS,
    ARTIFACT_BYTES,
    EVENT_BYTES,
    JOBS_BY,
    PROJECT_MEMBERS,
    PROJECTS,
    UPLOADS,
)

_DEFAULT = Project(name=DEFAULT_PROJECT, description="jobs, keys and uploads that name no other project")


@dataclass(frozen=True)
class Projects:
    """Projects by name. The default one always exists, and every owner of a key of it is a member."""

    client: BrokerClient
    limits: StoreLimits

    def create(self, name: str, description: str = "") -> Project:
        """Make a project with the default quotas. Raises :class:`Rejected` for an invalid name, :class:`Conflict` for
        a taken one.
        """
        if re.fullmatch(PROJECT_PATTERN, name) is None:
            raise Rejected([Problem("name", "not a name of a project", name, f"a match of {PROJECT_PATTERN}")])
        quotas, created = parse_quotas(self.limits.default_quotas), decode.now()
        made = Project(name=name, description=description, created_at=created, quotas=quotas)
        if name == DEFAULT_PROJECT or not stubs.create_project(self.client, name, _entry(made), _for_placement(quotas)):
            raise Conflict(f"there is a project {name} already")
        return made

    def get(self, name: str) -> Project:
        """Return a project. Raises :class:`NotFound`."""
        return _project(name, self.client.call("HGET", PROJECTS(), name))

    def all(self) -> list[Project]:
        """List all projects by name."""
        entries = self.client.call("HVALS", PROJECTS())
        found = {project.name: project for project in map(Project.model_validate_json, entries)}
        return sorted(({DEFAULT_PROJECT: _DEFAULT} | found).values(), key=lambda project: project.name)

    def change(self, name: str, quotas: Mapping[str, Any] = MappingProxyType({}), **fields: Any) -> Project:
        """Change some quotas and fields, all or none; ``None`` removes a quota. Raises :class:`NotFound`, and
        :class:`Rejected` if the default time limit of jobs would be refused.
        """
        while True:
            text = self.client.call("HGET", PROJECTS(), name)
            before = _project(name, text)
            limits = Quotas(**before.quotas.model_dump() | dict(quotas))
            if limits.refuse_their_default:
                message = "beyond the longest time limit that a job may have"
                accepted = f"at most {limits.longest_time_s:g} s, the longest_time_s"
                raise Rejected([Problem("quotas.default_time_s", message, limits.default_time_s, accepted)])
            changed = before.model_copy(update={**fields, "quotas": limits})
            if stubs.change_project(self.client, name, text or "", _entry(changed), _for_placement(limits)):
                return changed

    def usage(self, name: str) -> ProjectUsage:
        """Return a project's use of everything that has a quota."""
        uploads = self.client.call("HVALS", UPLOADS(name))
        held, used_ms = stubs.read_device_use(self.client, self.limits.script_argument, name)
        return ProjectUsage(
            devices=int(held),
            device_hours=round(int(used_ms) / 3_600_000, 3),
            queued_jobs=self.client.call("ZCARD", JOBS_BY(f"state:queued:{name}")),
            upload_bytes=sum(orjson.loads(text)["bytes"] for text in uploads),
            artifact_bytes=artifact_bytes(self.client, name),
        )

    def delete(self, name: str) -> None:
        """Forget a project. Raises :class:`NotFound`, and :class:`Conflict` while it has jobs, uploads, keys,
        accounts or webhooks.
        """
        stubs.delete_project(self.client, name)

    def members(self, name: str) -> list[ProjectMember]:
        """List the members of a project by name; none for the default one, whose members are the owners of its keys."""
        roles = self.client.call("HGETALL", PROJECT_MEMBERS(name))
        return sorted(
            (ProjectMember(name=owner, role=role) for owner, role in roles.items()), key=lambda member: member.name
        )

    def set_member(self, name: str, owner: str, role: Role) -> None:
        """Give the owner of keys a role in a project, at once. Raises :class:`NotFound` and, for the default project,
        :class:`Conflict`.
        """
        stubs.set_member(self.client, name, owner, role)

    def remove_member(self, name: str, owner: str) -> None:
        """End a membership: the owner's keys of the project stop working, and open streams end."""
        stubs.set_member(self.client, name, owner, "")


def _project(name: str, text: str | None) -> Project:
    """Return a project as it is stored. Raises :class:`NotFound`."""
    if text is None and name != DEFAULT_PROJECT:
        raise NotFound(f"there is no project {name}")
    return _DEFAULT if text is None else Project.model_validate_json(text)


def artifact_bytes(client: BrokerClient, project: str) -> int:
    """Return how many bytes a project's jobs have, of artifacts and of events."""
    return sum(int(client.call("HGET", key, project) or 0) for key in (ARTIFACT_BYTES(), EVENT_BYTES()))


def _for_placement(quotas: Quotas) -> str:
    """Return the quotas that the script of placement enforces, as it reads them; empty where there are none."""
    placed = quotas.model_dump(include={"devices", "device_hours"}, exclude_none=True)
    return json_of(placed) if placed else ""


def _entry(project: Project) -> str:
    return json_of(project.model_dump(mode="json"))


@dataclass(frozen=True)
class ServiceAccounts:
    """Service accounts. Their names are names of owners, which no other key and no person who signs in has."""

    client: BrokerClient
    keys: ApiKeys

    def create(self, name: str, scopes: Sequence[Scope], project: str | None = None) -> ServiceAccount:
        """Make an account without keys, of a project as in :meth:`ApiKeys.create`. Raises :class:`Rejected`,
        and :class:`Conflict` for a taken name.
        """
        check_grant(scopes, project)
        account = ServiceAccount(
            name=name,
            scopes=tuple(dict.fromkeys(scopes)),
            project=project or project_of(scopes),
            created_at=decode.now(),
        )
        stubs.create_account(self.client, name, _write_account(account), account.project or "")
        return account

    def get(self, name: str) -> ServiceAccount:
        """Return an account with its keys. Raises :class:`NotFound`."""
        found = next((account for account in self.list() if account.name == name), None)
        if found is None:
            raise NotFound(f"there is no service account {name!r}")
        return found

    def list(self) -> list[ServiceAccount]:
        """List the accounts by name, with their keys."""
        entries = self.client.call("HVALS", ACCOUNTS())
        accounts = sorted(map(ServiceAccount.model_validate_json, entries), key=lambda account: account.name)
        keys = [key for key in self.keys.list() if key.holder == "account"]
        return [
            account.model_copy(update={"keys": tuple(key for key in keys if key.name == account.name)})
            for account in accounts
        ]

    def disable(self, name: str) -> ServiceAccount:
        """Stop all keys of an account, at once; their streams end. Raises :class:`NotFound`."""
        return self._switch(name, disabled=True)

    def enable(self, name: str) -> ServiceAccount:
        """Let an account's keys work again. Raises :class:`NotFound`."""
        return self._switch(name, disabled=False)

    def delete(self, name: str) -> int:
        """Delete an account and revoke its keys; return how many there were. Its jobs stay. Raises
        :class:`NotFound`.
        """
        return stubs.delete_account(self.client, name)

    def _switch(self, name: str, *, disabled: bool) -> ServiceAccount:
        account = self.get(name).model_copy(update={"disabled": disabled})
        stubs.switch_account(self.client, name, _write_account(account), int(disabled))
        return account


def _write_account(account: ServiceAccount) -> str:
    return account.model_dump_json(exclude={"keys"})

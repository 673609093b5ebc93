"""Keeps service accounts: programs that own jobs, with several keys that stop and start together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from service.jobs.projects import Scope
from service.jobs.records import NotFound, ServiceAccount
from service.jobs.store import decode, stubs
from service.jobs.store.client import BrokerClient
from service.jobs.store.keys import ApiKeys, check_grant, project_of
from service.jobs.store.keyspace import ACCOUNTS


@dataclass(frozen=True)
class ServiceAccounts:
    """Names of accounts are names of owners; no other key, and no person who signs in, has one of them."""

    client: BrokerClient
    keys: ApiKeys

    def create(self, name: str, scopes: Sequence[Scope], project: str | None = None) -> ServiceAccount:
        """Make an account without keys, of a project as :meth:`ApiKeys.create` has it. Raises :class:`Rejected`, and
        :class:`Conflict` for a name that is taken.
        """
        check_grant(scopes, project)
        account = ServiceAccount(
            name=name,
            scopes=tuple(dict.fromkeys(scopes)),
            project=project or project_of(scopes),
            created_at=decode.moment(round(time.time() * 1000)),
        )
        stubs.create_account(self.client, name, _stored(account), account.project or "")
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
        stubs.switch_account(self.client, name, _stored(account), int(disabled))
        return account


def _stored(account: ServiceAccount) -> str:
    return account.model_dump_json(exclude={"keys"})

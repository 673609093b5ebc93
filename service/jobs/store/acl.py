"""Says which keys and commands each user of the broker may use, as the rules of an access control list.

A deployment gives the broker one user for the API and one, or one each, for worker hosts. Agents place and reap
for the whole fleet, so a host's user changes jobs, hosts, leases and the queue. It neither reads nor writes the
credentials of people (API keys, sessions, sign-ins), the audit log or the records of uploads. Its rules follow
from the scripts that a host calls: they allow the keys and commands of these scripts, and nothing else.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from service.jobs.store import stubs
from service.jobs.store.keyspace import KEYS, PREFIX
from service.jobs.store.scripts import Script

CELERY_PREFIX = f"{PREFIX}celery:"
"""The prefix of Celery's own keys."""
SHORTEST_PASSWORD = 32
"""The fewest characters of a password. The list holds plain SHA-256 digests, which are useless to a reader only if
the password is long and random.
"""

_SCRIPTS = [each for each in vars(stubs).values() if isinstance(each, Script)]
HOST_SCRIPTS = tuple(each for each in _SCRIPTS if "host" in each.callers)
"""The scripts that agents and supervisors call."""
API_SCRIPTS = tuple(each for each in _SCRIPTS if "api" in each.callers)
"""The scripts that the API and the restore of a backup call; a script may be among both."""

_HOST_READS = ("BLPOP", "EXISTS", "HGET", "HGETALL", "TIME", "XINFO|STREAM", "XRANGE", "XREVRANGE", "ZRANGE")
"""Commands that agents and supervisors send outside scripts, on keys of :data:`HOST_SCRIPTS`."""
_CONNECTION = ("CLIENT|SETINFO", "CLIENT|SETNAME", "EVAL", "EVALSHA", "PING", "SELECT")
_CELERY = (
    "BRPOP", "DEL", "DISCARD", "EXEC", "HDEL", "HGET", "HSET", "LLEN", "LPUSH", "MULTI", "PEXPIRE", "RPOP",
    "RPUSH", "SADD", "SCRIPT|LOAD", "SET", "SMEMBERS", "SREM", "UNWATCH", "WATCH", "ZADD", "ZRANGE", "ZREM",
)  # fmt: skip
"""Commands of Celery's transport for sending and for taking messages."""
_API_COMMANDS = (
    "+@read", "+@write", "+@connection", "+@transaction", "-@dangerous", "-@admin", "-@scripting",
    "+eval", "+evalsha", "+time", "+info", "+config|get",
)  # fmt: skip
"""All commands that read and write keys, and those that tell whether the broker is durable."""
_NAME = re.compile(r"api|host(-[A-Za-z0-9._-]+)?", re.ASCII)


@dataclass(frozen=True)
class Role:
    """Lists the rights of a role's users: patterns of keys, and access rules for commands."""

    keys: tuple[str, ...]
    commands: tuple[str, ...]

    def rule(self, user: str, password: str) -> str:
        """Return the line of an access control list that admits ``user`` by the digest of ``password``."""
        digest = hashlib.sha256(password.encode()).hexdigest()
        keys = [f"~{pattern}" for pattern in self.keys]
        return " ".join(["user", user, "reset", "on", f"#{digest}", *keys, "-@all", *self.commands])


API = Role(keys=tuple(sorted(key.glob for key in KEYS)), commands=_API_COMMANDS)


def _host() -> Role:
    families = set[str]().union(*(script.keys for script in HOST_SCRIPTS))
    commands = set[str]().union(*(script.commands for script in HOST_SCRIPTS))
    patterns = [key.glob for key in KEYS if key.name in families]
    allowed = sorted(commands.union(_HOST_READS, _CONNECTION, _CELERY))
    return Role(
        keys=(*sorted(patterns), f"{CELERY_PREFIX}*"), commands=tuple(f"+{command.lower()}" for command in allowed)
    )


HOST = _host()
PROBE = "user probe reset on nopass -@all +ping"
"""Anyone who reaches the broker may ask whether it answers, as health checks do."""


def access_list(passwords: Mapping[str, str]) -> str:
    """Return a broker's ``aclfile`` for these users and their passwords.

    ``api`` is the API's user; ``host``, and ``host-…`` with any name, are hosts'. Raises ``ValueError`` for another
    name, for a password shorter than :data:`SHORTEST_PASSWORD` or with white space, and without a user ``api`` and
    one of a host.
    """
    roles = {user: role_of(user) for user in sorted(passwords)}
    for user, password in passwords.items():
        _check_password(user, password)
    if "api" not in roles or len(roles) < 2:
        there = ", ".join(roles) or "none"
        raise ValueError(f"users api and host (or host-NAME for some hosts) are needed; there are {there}")
    rules = [role.rule(user, passwords[user]) for user, role in roles.items()]
    return "\n".join(["user default reset off", PROBE, *rules]) + "\n"


def role_of(user: str) -> Role:
    """Return a user's role, by its name. Raises ``ValueError`` for a name without a role."""
    if not _NAME.fullmatch(user):
        raise ValueError(f"{user!r} is not a user of the broker; expected api, host, or host- with the name of a host")
    return API if user == "api" else HOST


def _check_password(user: str, password: str) -> None:
    if len(password) < SHORTEST_PASSWORD or re.search(r"\s", password):
        raise ValueError(
            f"the password of {user} must have {SHORTEST_PASSWORD} characters or more and no white space; it has "
            f"{len(password)}"
        )

"""Defines who may do what: projects, the roles of their members, and the person that a sign-in stands for."""

from service.jobs.accounts.projects import (
    DEFAULT_PROJECT,
    LONGEST_DESCRIPTION,
    PROJECT_PATTERN,
    ROLES,
    SCOPES,
    Project,
    ProjectDetails,
    ProjectMember,
    ProjectName,
    ProjectUsage,
    Quotas,
    Role,
    Scope,
    owner_in,
    parse_quotas,
)
from service.jobs.accounts.sign_in import NotAdmitted, Person, parse_rules, person_of

__all__ = [
    "DEFAULT_PROJECT",
    "LONGEST_DESCRIPTION",
    "PROJECT_PATTERN",
    "ROLES",
    "SCOPES",
    "NotAdmitted",
    "Person",
    "Project",
    "ProjectDetails",
    "ProjectMember",
    "ProjectName",
    "ProjectUsage",
    "Quotas",
    "Role",
    "Scope",
    "owner_in",
    "parse_quotas",
    "parse_rules",
    "person_of",
]

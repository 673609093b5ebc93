"""Provides the client's calls about projects and their members."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from service.jobs.projects import Project, ProjectDetails, Role
from trivet.connection import Connection


@dataclass(frozen=True)
class ProjectsResource:
    """Projects. To make, change and delete one needs an operator's key; its members, also a maintainer's."""

    connection: Connection

    def create(self, name: str, description: str = "") -> Project:
        body = {"name": name, "description": description}
        return Project.model_validate(self.connection.json("POST", "/v1/projects", json=body))

    def list(self) -> list[Project]:
        """List the key's project; an operator's key lists all."""
        return [Project.model_validate(item) for item in self.connection.json("GET", "/v1/projects")["items"]]

    def get(self, name: str) -> ProjectDetails:
        return ProjectDetails.model_validate(self.connection.json("GET", _project(name)))

    def change(self, name: str, **changes: Any) -> ProjectDetails:
        """Change a project's ``description``, or those of its ``quotas`` that are given: ``None`` takes one away."""
        return ProjectDetails.model_validate(self.connection.json("PATCH", _project(name), json=changes))

    def delete(self, name: str) -> None:
        """Delete a project that has no jobs, no uploads and no keys."""
        self.connection.json("DELETE", _project(name))

    def set_member(self, name: str, owner: str, role: Role) -> ProjectDetails:
        """Give the owner of keys a role in a project."""
        return ProjectDetails.model_validate(
            self.connection.json("PUT", f"{_project(name)}/members/{quote(owner, safe='')}", json={"role": role})
        )

    def remove_member(self, name: str, owner: str) -> None:
        """End a membership, at once."""
        self.connection.json("DELETE", f"{_project(name)}/members/{quote(owner, safe='')}")


def _project(name: str) -> str:
    return f"/v1/projects/{quote(name, safe='')}"

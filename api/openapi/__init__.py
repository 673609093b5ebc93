"""Assembles the OpenAPI document."""

from api.openapi.assembly import document

__all__ = ["document"]

"""Writes text from others safely: on a terminal, in a log.

``documents``, JSON and YAML, is imported by its own name: only what reads specs needs YAML.
"""

from service.jobs.text.logs import LogFormat, log_field, log_fields, log_to_stderr, set_log_fields
from service.jobs.text.safe_text import (
    LONGEST_TEXT,
    first_control,
    folded,
    shortened,
    visible,
    visible_in_json,
    visible_json,
)

__all__ = [
    "LONGEST_TEXT",
    "LogFormat",
    "first_control",
    "folded",
    "log_field",
    "log_fields",
    "log_to_stderr",
    "set_log_fields",
    "shortened",
    "visible",
    "visible_in_json",
    "visible_json",
]

"""Writes the list of alerts as a file of rules for Prometheus: ``python -m service.jobs.monitoring.rules``."""

from __future__ import annotations

import sys

import yaml

from service.jobs.monitoring.alerts import ALERTS


def rules() -> str:
    """Return the text of ``docker/prometheus/trivet.rules.yml``."""
    listed = [
        {
            "alert": alert.name,
            "expr": alert.condition.promql,
            "for": f"{alert.for_s}s",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.meaning, "action": alert.action},
        }
        for alert in ALERTS
    ]
    head = "# Made by `python -m service.jobs.monitoring.rules` from service/jobs/monitoring/alerts.py.\n"
    return head + yaml.safe_dump({"groups": [{"name": "trivet", "rules": listed}]}, sort_keys=False, width=120)


if __name__ == "__main__":
    sys.stdout.write(rules())

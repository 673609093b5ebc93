"""Sends webhooks, round by round, and only to addresses that a key holder may reach."""

from api.deliveries.addresses import (
    ForbiddenTarget,
    NamedAddresses,
    WebhookAddress,
    check_recipient,
    has_wandb,
    token_for,
    vetted,
)
from api.deliveries.rounds import FAILURES, DeliveryRounds, RoundTimes
from api.deliveries.webhooks import WebhookSender

__all__ = [
    "FAILURES",
    "DeliveryRounds",
    "ForbiddenTarget",
    "NamedAddresses",
    "RoundTimes",
    "WebhookAddress",
    "WebhookSender",
    "check_recipient",
    "has_wandb",
    "token_for",
    "vetted",
]

"""Sends messages by e-mail, through the operator's server and to the recipients that the operator allows."""

from __future__ import annotations

import smtplib
import ssl
from contextlib import suppress
from datetime import datetime
from email.message import EmailMessage
from email.utils import format_datetime
from urllib.parse import unquote, urlsplit

from api.deliveries.addresses import ForbiddenTarget, check_recipient
from service.jobs.records.messages import message_of
from service.jobs.records.webhooks import WebhookDelivery
from service.jobs.settings import Settings

_PORTS = {"smtps": 465, "smtp": 587, "smtp+plain": 25}


def send_mail(settings: Settings, url: str, delivery: WebhookDelivery, sent_at: datetime, limit_s: float) -> None:
    """Send one message; not for a thread that runs an event loop. A repeated one has the same ``Message-ID``.

    Raises ``OSError``, of which the errors of ``smtplib`` are some, and :class:`ForbiddenTarget` for a recipient that
    is not allowed.
    """
    try:
        check_recipient(settings, url)
    except ValueError as error:
        raise ForbiddenTarget(f"{url}: expected {error}") from None
    assert settings.smtp_url is not None
    parts = urlsplit(settings.smtp_url.get_secret_value())
    server = _connected(parts.scheme, parts.hostname or "", parts.port or _PORTS[parts.scheme], limit_s)
    try:
        if parts.username is not None:
            server.login(unquote(parts.username), unquote(parts.password or ""))
        server.send_message(_mail(settings.smtp_from or "", url.removeprefix("mailto:"), delivery, sent_at))
    finally:
        with suppress(OSError):
            server.quit()


def _connected(scheme: str, host: str, port: int, limit_s: float) -> smtplib.SMTP:
    if scheme == "smtps":
        return smtplib.SMTP_SSL(host, port, timeout=limit_s, context=ssl.create_default_context())
    server = smtplib.SMTP(host, port, timeout=limit_s)
    if scheme == "smtp":
        try:
            server.starttls(context=ssl.create_default_context())
        except OSError:
            server.close()
            raise
    return server


def _mail(sender: str, recipient: str, delivery: WebhookDelivery, sent_at: datetime) -> EmailMessage:
    message, mail = message_of(delivery.event), EmailMessage()
    mail["From"], mail["To"], mail["Subject"] = sender, recipient, f"Trivet: {message.subject}"
    mail["Date"], mail["Message-ID"] = format_datetime(sent_at), f"<{delivery.id}@{sender.rpartition('@')[2]}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text + "\n")
    return mail

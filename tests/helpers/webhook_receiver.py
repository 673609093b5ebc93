"""A receiver of webhooks on the loopback, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from http_receiver import Reply, Request, listening


@dataclass
class Receiver:
    """Answers each request with the next of ``answers``, and the last of them from then on."""

    answers: list[int] = field(default_factory=lambda: [204])
    taken: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    url: str = ""

    def answer(self, request: Request) -> Reply:
        self.taken.append((request.headers, request.body))
        status = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Reply(status, headers={"Location": f"{self.url}/elsewhere"} if status == 302 else {})


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Run a receiver in a thread."""
    receiver = Receiver()
    with listening(receiver.answer) as url:
        receiver.url = f"{url}/hook"
        yield receiver

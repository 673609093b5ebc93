"""An iteration that is repeated: on a CUDA device recorded once and replayed, so that its launches cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


class Repeated:
    """``body`` takes nothing, returns nothing, and works on tensors that stay where they are.

    On a CUDA device the first run is as written, since that is when libraries make their plans and the body its
    tensors; the second is recorded; the rest replay the record. Kernels are the same, and so are results.
    """

    def __init__(self, body: Callable[[], None], device: torch.device) -> None:
        self.body, self.device = body, device
        self.record: torch.cuda.CUDAGraph | None = None

    def run(self, times: int) -> None:
        if self.device.type != "cuda":
            for _ in range(times):
                self.body()
            return
        done = 0
        if self.record is None:
            done = min(times, WARM)
            self._warm(done)
            if times > done:
                self.record = self._recorded()
        if self.record is not None:
            for _ in range(times - done):
                self.record.replay()

    def _warm(self, times: int) -> None:
        """On a stream of its own: what is recorded may not be the default stream's."""
        stream = recording_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(times):
                self.body()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def _recorded(self) -> torch.cuda.CUDAGraph:
        stream, record = recording_stream(self.device), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(stream):
            record.capture_begin(capture_error_mode="thread_local")
            try:
                self.body()
            finally:
                record.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return record


@cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


WARM = 1

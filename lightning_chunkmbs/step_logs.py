"""The last value of what steps log is that of the last step, whichever ends first.

Touches a private part of Lightning's results, as ``window.py`` does those of its loops.
"""

from __future__ import annotations

from typing import Any


class StepLogs:
    """Notes which step logged which value while steps take turns.

    Lightning shows of what is logged ``on_step`` the value that was logged last, in steps one by one that of the last
    micro-batch. Side by side a step that calls fewer blocks ends, and logs, before earlier ones.

    Args:
        results: the Trainer's results of training, by key; None before it trains.
    """

    def __init__(self, results: Any) -> None:
        self.results = results
        self._step = 0
        self._before: dict[str, Any] = {}
        self._last: dict[str, tuple[int, Any]] = {}  # the latest step that logged, and what

    def turn(self, step: int) -> None:
        """Note what was logged since the last call; what comes now is logged by ``step``."""
        now = {key: metric._forward_cache for key, metric in (self.results or {}).items()}
        for key, value in now.items():
            if value is not self._before.get(key) and self._step >= self._last.get(key, (0,))[0]:
                self._last[key] = self._step, value
        self._before, self._step = now, step

    def settle(self) -> None:
        """Let what the latest steps logged be what was logged last; all steps have ended."""
        self.turn(0)
        for key, (_, value) in self._last.items():
            metric = self.results[key]
            metric._forward_cache = value
            if metric.is_tensor and not metric.meta.on_epoch:
                metric.value = value
        self._before, self._last = {}, {}

"""What drafts took and brought, as the controller sees it, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outpace.decisions import DrafterReport

__all__ = ["control_metrics"]

_LABELS = ("model_name", "engine", "drafter")
_COUNTERS: Mapping[str, tuple[str, Callable[[DrafterReport], float]]] = {
    "drafting_seconds": ("Spent in calls of a drafter.", lambda report: report.drafting_seconds),
    "verifying_seconds": ("Of steps with drafts, beyond what they take without.", lambda r: r.verifying_seconds),
    "expected_accepted_tokens": ("Draft tokens that were expected to be kept.", lambda r: r.expected_accepted),
}
_GAUGES: Mapping[str, tuple[str, Callable[[DrafterReport], float | None]]] = {
    "expected_gain": ("Tokens per second over the plain rate, as predicted.", lambda report: report.expected_gain),
    "gain": ("Tokens per second over the plain rate, as it came.", lambda report: report.gain),
    "drafter_off": ("1 while a drafter is not asked, because it does not pay.", lambda r: float(r.off is not None)),
}


def control_metrics(reports: Mapping[str, DrafterReport], model_name: str) -> Iterator[Metric]:
    """Three counters and three gauges, with a sample for every drafter that has something to report."""
    for name, (text, value) in _COUNTERS.items():
        counter = CounterMetricFamily(f"outpace:{name}", text, labels=_LABELS)
        for drafter, report in reports.items():
            counter.add_metric((model_name, "0", drafter), value(report))
        yield counter
    for name, (text, found) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"outpace:{name}", text, labels=_LABELS)
        for drafter, report in reports.items():
            number = found(report)
            if number is not None:
                gauge.add_metric((model_name, "0", drafter), number)
        yield gauge

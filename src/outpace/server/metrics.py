"""Numbers for Prometheus at /metrics, under vLLM's names and with vLLM's meanings: its dashboards go on working.

They are kept here, plainly, and become Prometheus' when somebody asks: a step then costs a few microseconds, a reader
sees whole steps only, and there are no times of creation (`_created`), which some readers take for counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outpace.async_llm import AsyncLLM, FinishedRequest, Load, StepReport
from outpace.decisions import ControlReport
from outpace.engine.outputs import DraftCounts
from outpace.server.control_metrics import control_metrics
from outpace.server.histogram import Histogram
from outpace.server.recording import RecordCounts, Recorder
from outpace.server.spec_log import SpecLogger

__all__ = ["Metrics", "add_metrics"]

_Values = Mapping[tuple[str, ...], float]
"""By values of further labels, after model_name and engine."""

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = ("stop", "length", "abort", "error")
_ANSWERED = frozenset({"stop", "length"})

# Bounds in seconds: vLLM's, because a quantile over buckets of several servers needs the same ones.
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)

_COUNTERS = {
    "prompt_tokens": "Prompt tokens computed.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Times a running request lost its place in the cache.",
    "prefix_cache_queries": "Prompt tokens looked up among the rows kept of earlier requests.",
    "prefix_cache_hits": "Prompt tokens whose rows had been computed for an earlier request.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token, of every choice.", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("From one step that brought a choice tokens to the next one that did.", _TOKEN),
    "request_time_per_output_token_seconds": ("Of an answered request: a token after those of its first step.", _TOKEN),
    "e2e_request_latency_seconds": ("From the arrival of an answered request to its end.", _REQUEST),
}


class Metrics(Collector):
    """What the steps of an engine have come to.

    Args:
        model_name: value of the label `model_name`.
        load: how busy the engine is now; called whenever somebody reads.
        drafters: {name of a drafter: most draft tokens a step} of those whose counters are there, at 0, before their
            first draft. Readers that compare before and after need that. Further drafters and positions are added when
            they come.
        control: what the controller of drafts has to say; called whenever somebody reads.
        recorded: what became of answers that were to be recorded; called whenever somebody reads.
    """

    def __init__(
        self,
        model_name: str,
        load: Callable[[], Load],
        drafters: Mapping[str, int] | None = None,
        control: Callable[[], ControlReport] | None = None,
        recorded: Callable[[], RecordCounts] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._load = load
        self._control = control
        self._recorded = recorded
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._ended = dict.fromkeys(_REASONS, 0)
        self._times = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._drafts = {name: DraftCounts(accepted_at=[0] * most) for name, most in (drafters or {}).items()}
        self.registry.register(self)

    def observe(self, step: StepReport) -> None:
        """Counts a step. A listener for `AsyncLLM.on_step`; may be called in any one thread."""
        with self._lock:
            self._counts["prompt_tokens"] += step.prompt_tokens
            self._counts["generation_tokens"] += step.generated_tokens
            self._counts["num_preemptions"] += step.preemptions
            for drafter, num_draft_tokens, num_accepted in step.drafts:
                if drafter not in self._drafts:
                    self._drafts[drafter] = DraftCounts()
                self._drafts[drafter].count_draft(num_draft_tokens, num_accepted)
            for seconds in step.first_token_seconds:
                self._times["time_to_first_token_seconds"].add(seconds)
            for seconds in step.gap_seconds:
                self._times["inter_token_latency_seconds"].add(seconds)
            for request in step.finished:
                self._count_finished(request)

    def text(self) -> tuple[bytes, str]:
        """All numbers as of now, in Prometheus' text format, and the content type."""
        return generate_latest(self.registry), _CONTENT_TYPE

    def collect(self) -> Iterable[Metric]:
        """All numbers as of now, for a registry of Prometheus."""
        load = self._load()
        reports = self._control().drafters if self._control is not None else {}
        with self._lock:  # for some tenths of a millisecond, so that no step is seen half
            self._counts["prefix_cache_queries"] = load.prefix_cache_queries
            self._counts["prefix_cache_hits"] = load.prefix_cache_hits
            own = [*self._gauges(load), *self._engine(), *self._speculation(), *self._by_drafter()]
        recorded = [] if self._recorded is None else self._recording(self._recorded())
        return [*own, *control_metrics(reports, self._model_name), *recorded]

    def _count_finished(self, request: FinishedRequest) -> None:
        """Choices are counted one by one. Only an answer says how long one takes: others were cut short."""
        for choice in request.outputs:
            self._ended[choice.finish_reason] = self._ended.get(choice.finish_reason, 0) + 1
        if not all(choice.finish_reason in _ANSWERED for choice in request.outputs):
            return
        self._times["e2e_request_latency_seconds"].add(request.total_seconds)
        tokens_per_choice = request.stats.decode_tokens / len(request.outputs)
        if tokens_per_choice:
            seconds = request.stats.decode_seconds / tokens_per_choice
            self._times["request_time_per_output_token_seconds"].add(seconds)

    def _gauges(self, load: Load) -> Iterator[Metric]:
        for name, value, text in (
            ("num_requests_running", load.running, "Choices that have a place in the cache."),
            ("num_requests_waiting", load.waiting, "Choices that wait for one."),
            ("kv_cache_usage_perc", load.cache_usage, "Share of the cache that is reserved; 1 is all of it."),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
            family.add_metric((self._model_name, "0"), value)
            yield family

    def _engine(self) -> Iterator[Metric]:
        for name, count in self._counts.items():
            yield self._counter(f"vllm:{name}", _COUNTERS[name], (), {(): count})
        reasons: _Values = {(reason,): count for reason, count in self._ended.items()}
        yield self._counter("vllm:request_success", "Choices that ended, by reason.", ("finished_reason",), reasons)
        for name, times in self._times.items():
            family = HistogramMetricFamily(f"vllm:{name}", _HISTOGRAMS[name][0], labels=("model_name", "engine"))
            family.add_metric((self._model_name, "0"), times.buckets(), times.total)
            yield family

    def _recording(self, counts: RecordCounts) -> Iterator[Metric]:
        yield self._counter("outpace:recorded_answers", "Answers written by --record.", (), {(): counts.written})
        lost: _Values = {(reason,): count for reason, count in counts.lost.items()}
        yield self._counter("outpace:unrecorded_answers", "Answers left out by --record.", ("reason",), lost)
        family = GaugeMetricFamily("outpace:record_bytes", "Taken by these files.", labels=("model_name", "engine"))
        family.add_metric((self._model_name, "0"), counts.num_bytes)
        yield family

    def _speculation(self) -> Iterator[Metric]:
        """Of all drafters together; without samples if there is none, as vLLM is silent without speculation."""
        stats: dict[tuple[str, ...], DraftCounts] = {}
        if self._drafts:
            stats[()] = DraftCounts()
            for counts in self._drafts.values():
                stats[()].add(counts)
        yield from self._drafted("vllm:spec_decode_num", (), stats)

    def _by_drafter(self) -> Iterator[Metric]:
        yield from self._drafted(
            "outpace:spec_decode_num", ("drafter",), {(name,): stats for name, stats in self._drafts.items()}
        )

    def _drafted(
        self, prefix: str, labels: tuple[str, ...], stats: Mapping[tuple[str, ...], DraftCounts]
    ) -> Iterator[Metric]:
        drafts = {key: each.drafts for key, each in stats.items()}
        yield self._counter(f"{prefix}_drafts", "Drafts verified.", labels, drafts)
        tokens = {key: each.draft_tokens for key, each in stats.items()}
        yield self._counter(f"{prefix}_draft_tokens", "Draft tokens verified.", labels, tokens)
        accepted = {key: each.accepted_tokens for key, each in stats.items()}
        yield self._counter(f"{prefix}_accepted_tokens", "Draft tokens kept.", labels, accepted)
        kept = {(*key, str(i)): count for key, each in stats.items() for i, count in enumerate(each.accepted_at)}
        text = "Draft tokens kept, by position in the draft."
        yield self._counter(f"{prefix}_accepted_tokens_per_pos", text, (*labels, "position"), kept)

    def _counter(self, name: str, text: str, labels: tuple[str, ...], values: _Values) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name", "engine", *labels))
        for key, value in values.items():
            family.add_metric((self._model_name, "0", *key), value)
        return family


def add_metrics(app: FastAPI, llm: AsyncLLM, model_name: str, recorder: Recorder | None = None) -> Metrics:
    """Listens to the steps of `llm` from now on, answers GET /metrics, and writes the log's lines about speculation."""
    drafters = {config.method: config.num_speculative_tokens or 0 for config in llm.built.speculative}
    metrics = Metrics(model_name, llm.load, drafters, llm.control, None if recorder is None else recorder.counts)
    llm.on_step(metrics.observe)
    llm.on_step(SpecLogger(max(drafters.values(), default=0)).observe)

    async def read(request: Request) -> Response:
        content, content_type = metrics.text()
        return Response(content, media_type=content_type)

    app.add_api_route("/metrics", read, methods=["GET", "HEAD"])
    return metrics

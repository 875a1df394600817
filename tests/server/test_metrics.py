"""Numbers at /metrics: against hand-counted steps, against what requests report, and as readers of vLLM's take them."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from outpace.async_llm import FinishedRequest, Load
from outpace.config import SpeculativeConfig
from outpace.decisions import ControlReport, DrafterReport
from outpace.drafters.ngram import NgramDrafter
from outpace.engine.outputs import CompletionOutput, RequestStats
from outpace.server.metrics import Metrics, add_metrics
from tests.asynchronous import complete, make_llm, run, settled
from tests.engine.fakes import HistoryModel, TokenCache
from tests.engine.harness import GREEDY, HOT, WARM
from tests.server.steps import step

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""{(name, labels other than model_name and engine): value}."""


def read(metrics: Metrics) -> Samples:
    """What Prometheus reads; every sample has to carry the model's name and the engine's."""
    return parsed(metrics.text()[0].decode(), "m/odel")


def parsed(text: str, model_name: str) -> Samples:
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name"), labels.pop("engine")) == (model_name, "0")
            key = (sample.name, frozenset(labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def finished(reasons: str, *, tokens: int = 0, decode: float = 0.0, total: float = 1.0) -> FinishedRequest:
    """A request whose choices ended for these reasons."""
    choices = [CompletionOutput(i, "", [], reason) for i, reason in enumerate(reasons.split())]
    stats = RequestStats(decode_tokens=tokens, decode_seconds=decode)
    return FinishedRequest(0, None, [1], choices, stats, total_seconds=total)


def test_counters_are_those_of_hand_counted_steps() -> None:
    metrics = Metrics(
        "m/odel", lambda: Load(3, 2, 0.25, prefix_cache_queries=40, prefix_cache_hits=8), {"ngram": 3, "self": 2}
    )
    metrics.observe(step([("ngram", 3, 2), ("ngram", 1, 1)], prompt=10, generated=5))
    metrics.observe(step([("self", 2, 0), ("ngram", 3, 3)], generated=5, preemptions=1))
    metrics.observe(step([], prompt=7))
    samples = read(metrics)
    spec = "vllm:spec_decode_num_"
    assert value(samples, spec + "drafts_total") == 4
    assert value(samples, spec + "draft_tokens_total") == 9
    assert value(samples, spec + "accepted_tokens_total") == 6
    kept = "accepted_tokens_per_pos_total"
    assert [value(samples, spec + kept, position=str(i)) for i in range(3)] == [3, 2, 1]
    assert len([key for key in samples if key[0].startswith(spec)]) == 6
    own = {key: number for key, number in samples.items() if key[0].startswith("outpace:")}
    assert value(own, "outpace:spec_decode_num_drafts_total", drafter="ngram") == 3
    assert value(own, "outpace:spec_decode_num_draft_tokens_total", drafter="ngram") == 7
    assert value(own, "outpace:spec_decode_num_accepted_tokens_total", drafter="ngram") == 6
    assert value(own, "outpace:spec_decode_num_drafts_total", drafter="self") == 1
    assert value(own, "outpace:spec_decode_num_draft_tokens_total", drafter="self") == 2
    assert value(own, "outpace:spec_decode_num_accepted_tokens_total", drafter="self") == 0
    kept = "outpace:spec_decode_num_" + kept
    assert [value(own, kept, drafter="ngram", position=str(i)) for i in range(3)] == [3, 2, 1]
    assert [value(own, kept, drafter="self", position=str(i)) for i in range(2)] == [0, 0]
    assert len(own) == 6 + 5
    assert value(samples, "vllm:prompt_tokens_total") == 17
    assert value(samples, "vllm:generation_tokens_total") == 10
    assert value(samples, "vllm:num_preemptions_total") == 1
    assert value(samples, "vllm:num_requests_running") == 3
    assert value(samples, "vllm:num_requests_waiting") == 2
    assert value(samples, "vllm:kv_cache_usage_perc") == 0.25
    assert value(samples, "vllm:prefix_cache_queries_total") == 40
    assert value(samples, "vllm:prefix_cache_hits_total") == 8


def test_speculation_is_silent_without_drafters_and_there_at_zero_with_them() -> None:
    def speculation(metrics: Metrics) -> list[float]:
        return [number for (name, _), number in read(metrics).items() if "spec_decode" in name]

    assert speculation(Metrics("m/odel", Load)) == []
    assert speculation(Metrics("m/odel", Load, {"ngram": 2})) == [0] * 10
    unknown = Metrics("m/odel", Load)
    unknown.observe(step([("ngram", 2, 1)]))
    assert sorted(speculation(unknown)) == [0, 0, 1, 1, 1, 1, 1, 1, 2, 2]


def test_times_lie_in_the_buckets_of_vllm() -> None:
    metrics = Metrics("m/odel", Load)
    metrics.observe(step([], first=[0.001, 0.0011, 3000.0], gaps=[0.01, 0.2, 0.21]))
    samples = read(metrics)

    def buckets(name: str) -> dict[str, float]:
        return {dict(labels)["le"]: number for (each, labels), number in samples.items() if each == name + "_bucket"}

    first = buckets("vllm:time_to_first_token_seconds")
    assert [first[bound] for bound in ("0.001", "0.005", "2560.0", "+Inf")] == [1, 2, 2, 3]
    assert value(samples, "vllm:time_to_first_token_seconds_sum") == pytest.approx(3000.0021)
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 3
    gaps = buckets("vllm:inter_token_latency_seconds")
    assert [gaps[bound] for bound in ("0.01", "0.025", "0.15", "0.2", "0.3", "80.0")] == [1, 1, 1, 2, 3, 3]
    assert [float(bound) for bound in first] == [
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
        *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0, float("inf")),
    ]
    tokens = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0]
    assert [float(bound) for bound in gaps] == [*tokens, float("inf")]
    assert list(buckets("vllm:request_time_per_output_token_seconds")) == list(gaps)
    assert [float(bound) for bound in buckets("vllm:e2e_request_latency_seconds")] == [
        *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
        *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0, float("inf")),
    ]


def test_choices_are_counted_by_reason_and_only_answers_are_timed() -> None:
    metrics = Metrics("m/odel", Load)
    assert {read(metrics)[key] for key in read(metrics) if key[0] == "vllm:request_success_total"} == {0}
    metrics.observe(
        step(
            [],
            finished=[
                finished("stop length", tokens=20, decode=3.0, total=4.0),
                finished("length", tokens=0, decode=0.0, total=0.5),
                finished("abort", tokens=5, decode=1.0, total=100.0),
                finished("stop error", tokens=5, decode=1.0, total=100.0),
            ],
        )
    )
    samples = read(metrics)
    reasons = {reason: 0.0 for reason in ("stop", "length", "abort", "error")}
    for reason in reasons:
        reasons[reason] = value(samples, "vllm:request_success_total", finished_reason=reason)
    assert reasons == {"stop": 2, "length": 2, "abort": 1, "error": 1}
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 2
    assert value(samples, "vllm:e2e_request_latency_seconds_sum") == 4.5
    assert value(samples, "vllm:request_time_per_output_token_seconds_count") == 1
    assert value(samples, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(3.0 / 10)


def test_the_text_is_prometheus_own_format() -> None:
    metrics = Metrics('a "model"', Load, {"ngram": 2})
    metrics.observe(step([("ngram", 2, 1)], generated=2))
    content, content_type = metrics.text()
    lines = content.decode().splitlines()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"model\\""} 1.0' in lines
    assert value(parsed(content.decode(), 'a "model"'), "vllm:generation_tokens_total") == 2
    assert not [line for line in lines if "_created" in line]
    types = dict(line.removeprefix("# TYPE ").split() for line in lines if line.startswith("# TYPE "))
    assert {name for name, kind in types.items() if kind == "counter"} == {
        *(f"{by}:spec_decode_num_{what}_total" for by in ("vllm", "outpace") for what in ("drafts", "draft_tokens")),
        *(f"{by}:spec_decode_num_accepted_tokens_total" for by in ("vllm", "outpace")),
        *(f"{by}:spec_decode_num_accepted_tokens_per_pos_total" for by in ("vllm", "outpace")),
        *(f"vllm:{name}_total" for name in ("prompt_tokens", "generation_tokens", "num_preemptions")),
        *(f"vllm:{name}_total" for name in ("prefix_cache_queries", "prefix_cache_hits", "request_success")),
        *(f"outpace:{what}_total" for what in ("drafting_seconds", "verifying_seconds", "expected_accepted_tokens")),
    }
    assert {name for name, kind in types.items() if kind == "gauge"} == {
        *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
        *("outpace:expected_gain", "outpace:gain", "outpace:drafter_off"),
    }
    assert {name for name, kind in types.items() if kind == "histogram"} == {
        *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
        *("vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds"),
    }


@pytest.mark.parametrize("version", ["old", "new"])
def test_a_benchmark_that_reads_lines_counts_right(version: str) -> None:
    """The rules of `vllm bench serve`: the old one takes every line of speculation and looks for words in all of it."""
    metrics = Metrics("m/odel", Load, {"ngram": 3, "self": 2})
    before = _bench(metrics.text()[0].decode(), version)
    metrics.observe(step([("ngram", 3, 2), ("self", 2, 2), ("ngram", 1, 0)]))
    after = _bench(metrics.text()[0].decode(), version)
    assert before == {"drafts": 0, "draft_tokens": 0, "accepted": 0, 0: 0, 1: 0, 2: 0}
    assert after == {"drafts": 3, "draft_tokens": 6, "accepted": 4, 0: 2, 1: 2, 2: 0}


def _bench(text: str, version: str) -> dict[str | int, int]:
    found: dict[str | int, int] = {"drafts": 0, "draft_tokens": 0, "accepted": 0}
    for line in text.split("\n"):
        name = line.split("{")[0] if version == "new" else line
        if not line.startswith("vllm:spec_decode") or (version == "new" and not name.endswith("_total")):
            continue
        number = int(float(line.split()[-1]))
        if "num_drafts" in name:
            found["drafts"] += number
        elif "num_draft_tokens" in name:
            found["draft_tokens"] += number
        elif "num_accepted_tokens_per_pos" in name:
            position = int(line.split('position="')[1].split('"')[0])
            found[position] = found.get(position, 0) + number
        elif "num_accepted_tokens" in name:
            found["accepted"] += number
    return found


def test_readers_see_whole_steps() -> None:
    metrics = Metrics("m/odel", Load, {"ngram": 3})
    ended = threading.Event()

    def steps() -> None:
        for _ in range(20_000):
            metrics.observe(step([("ngram", 3, 2), ("ngram", 2, 2)], generated=6, gaps=[0.02, 0.3]))
        ended.set()

    thread = threading.Thread(target=steps)
    thread.start()
    looks = 0
    while not ended.is_set() or looks == 0:
        samples = read(metrics)
        drafts = value(samples, "vllm:spec_decode_num_drafts_total")
        assert value(samples, "vllm:generation_tokens_total") == 3 * drafts
        assert value(samples, "vllm:spec_decode_num_draft_tokens_total") == 2.5 * drafts
        assert value(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1") == drafts
        assert value(samples, "outpace:spec_decode_num_accepted_tokens_total", drafter="ngram") == 2 * drafts
        assert value(samples, "vllm:inter_token_latency_seconds_count") == drafts
        assert value(samples, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.16 * drafts)
        looks += 1
    thread.join()
    assert value(read(metrics), "vllm:spec_decode_num_drafts_total") == 40_000


def test_a_server_counts_what_its_requests_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outpace")

    async def main() -> None:
        llm = make_llm(HistoryModel(24), {"ngram": NgramDrafter(1, 4)}, cache=TokenCache(max_rows=130), seqs=5, rows=24)
        llm.built = replace(llm.built, speculative=(SpeculativeConfig(method="ngram", num_speculative_tokens=4),))
        app = FastAPI()
        assert value(read(add_metrics(app, llm, "m/odel")), "vllm:spec_decode_num_drafts_total") == 0
        async with llm:
            asked = [replace((GREEDY, WARM, HOT)[i % 3], n=1 + i % 2) for i in range(9)]
            outputs = await asyncio.gather(*(complete(llm, [i % 24] * 20, each) for i, each in enumerate(asked)))
            await settled(llm)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                answer = await client.get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        samples, stats = parsed(answer.text, "m/odel"), [output.stats for output in outputs]
        choices = [choice for output in outputs for choice in output.outputs]
        for name, expected in (
            ("spec_decode_num_drafts_total", sum(each.drafts for each in stats)),
            ("spec_decode_num_draft_tokens_total", sum(each.draft_tokens for each in stats)),
            ("spec_decode_num_accepted_tokens_total", sum(each.accepted_tokens for each in stats)),
            ("prompt_tokens_total", 20 * len(choices)),
            ("generation_tokens_total", sum(len(choice.token_ids) for choice in choices)),
            ("num_preemptions_total", sum(each.preemptions for each in stats)),
            ("time_to_first_token_seconds_count", len(choices)),
            ("e2e_request_latency_seconds_count", len(outputs)),
            ("request_time_per_output_token_seconds_count", len(outputs)),
        ):
            assert value(samples, "vllm:" + name) == expected > 0, name
        for position in range(4):
            expected = sum(each.accepted_at[position] for each in stats if position < len(each.accepted_at))
            found = value(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(position))
            assert found == expected
        assert value(samples, "vllm:request_success_total", finished_reason="length") == len(choices)
        assert value(samples, "vllm:num_requests_running") == value(samples, "vllm:num_requests_waiting") == 0
        assert value(samples, "vllm:kv_cache_usage_perc") == 0

    run(main())
    lines = [record.getMessage() for record in caplog.records if record.name == "outpace.server.spec_log"]
    assert lines and lines[0].startswith("SpecDecoding metrics: Mean acceptance length: ")


def test_what_the_controller_reports() -> None:
    on = DrafterReport("suffix", 5, 20, 11.5, 12, 0.0, 0.25, 1.5, 1.75, None)
    off = DrafterReport("draft_model", 0, 0, 0.0, 0, 0.5, 0.0, None, None, "draft_model: 0.8 tokens expected")
    report = ControlReport({"suffix": on, "draft_model": off}, 9, 1.0, 0.0)
    content, _ = Metrics("m/odel", Load, control=lambda: report).text()
    found = {line for line in content.decode().splitlines() if line.startswith("outpace:") and "drafter=" in line}
    labels = {name: f'{{drafter="{name}",engine="0",model_name="m/odel"}}' for name in report.drafters}
    assert found == {
        *(f"outpace:drafting_seconds_total{labels[name]} {n}" for name, n in (("suffix", 0.0), ("draft_model", 0.5))),
        *(f"outpace:verifying_seconds_total{labels[name]} {n}" for name, n in (("suffix", 0.25), ("draft_model", 0.0))),
        f"outpace:expected_accepted_tokens_total{labels['suffix']} 11.5",
        f"outpace:expected_accepted_tokens_total{labels['draft_model']} 0.0",
        f"outpace:expected_gain{labels['suffix']} 1.5",
        f"outpace:gain{labels['suffix']} 1.75",
        f"outpace:drafter_off{labels['suffix']} 0.0",
        f"outpace:drafter_off{labels['draft_model']} 1.0",
    }

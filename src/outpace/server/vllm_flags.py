"""vLLM's flags that are no options of outpace: which are let pass, which are refused, and why.

The rule: what only concerns hardware, memory, speed or logs is accepted and named in one warning. What would change
answers, what clients are offered, or who may ask, is refused, unless its value is the one that changes nothing.
Never imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FLAGS", "SHORT", "ForeignFlag"]


def _never(value: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of vLLM that outpace has no option for.

    Args:
        name: with hyphens, without the leading ones.
        takes: "nothing" (a switch, also as `--no-name`), "one" value, or "many".
        refusal: why outpace cannot do it and what would work; None if it is let pass.
        harmless: values with which a refused flag changes nothing, so that it is let pass.
        silent: outpace does this anyway, so nobody needs to be told.
        note: what to say where it is let pass with a value that is not harmless.
    """

    name: str
    takes: str = "one"
    refusal: str | None = None
    harmless: Callable[[str], bool] = _never
    silent: bool = False
    note: str | None = None

    def refuses(self, value: str) -> bool:
        """Whether it cannot be let pass with this value; of a switch, "true" or "false" (`--no-name`)."""
        return self.refusal is not None and not self.harmless(value)


def _among(*values: str) -> Callable[[str], bool]:
    return lambda value: value.lower() in values


def _number(*values: float) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        try:
            return float(value) in values
        except ValueError:
            return False

    return check


def _json(*values: Any) -> Callable[[str], bool]:
    def check(value: str) -> bool:
        try:
            return json.loads(value) in values
        except ValueError:
            return False

    return check


def _json_with(*keys: str) -> Callable[[str], bool]:
    """A JSON object in which nothing but these keys is set, or switched on."""

    def check(value: str) -> bool:
        try:
            found = json.loads(value)
        except ValueError:
            return False
        return isinstance(found, dict) and all(
            key.replace("-", "_") in keys or item in (None, False) for key, item in found.items()
        )

    return check


_empty = _json({}, None)
_off = _among("false")


def _let_pass(takes: str, names: str) -> list[ForeignFlag]:
    return [ForeignFlag(name, takes) for name in names.split()]


def _always_so(names: str) -> list[ForeignFlag]:
    return [ForeignFlag(name, "nothing", silent=True) for name in names.split()]


def _one_device(names: str, what: str) -> list[ForeignFlag]:
    note = f"there is {what} here, and the text does not depend on it"
    return [ForeignFlag(name, harmless=_number(1, 0), note=note) for name in names.split()]


def _switch(name: str, why: str) -> ForeignFlag:
    return ForeignFlag(name, "nothing", why, _off)


_LORA = "outpace has no LoRA adapters at run time: merge the adapter into the weights"
_PROMPT_ADAPTER = "outpace has no prompt adapters"
_REVISION = "outpace takes a hub model's main revision: download another one and give its folder as --model"
_TLS = "outpace speaks plain HTTP: put a proxy that does TLS in front"
_CODE = "outpace loads no code into the server"
_CONFIG = "outpace takes the model as its config.json says: change it there"
_SPREAD = "outpace is one process on one machine"
_TEXT_ONLY = "outpace takes and gives text"
_TYPICAL = "typical acceptance changes what the model says, and outpace has no rule that does; leave it out"
_SWITCHES = """
    enforce-eager use-v2-block-manager disable-custom-all-reduce disable-log-stats
    disable-frontend-multiprocessing disable-async-output-proc use-async-output-proc async-scheduling
    enable-expert-parallel enable-eplb enable-dbo ray-workers-use-nsight worker-use-ray engine-use-ray
    multi-step-stream-outputs disable-cascade-attn disable-chunked-mm-input
    disable-hybrid-kv-cache-manager calculate-kv-scales kv-sharing-fast-prefill enable-sleep-mode
    enable-server-load-tracking enable-request-id-headers enable-prompt-tokens-details log-error-stack
    enable-tokenizer-info-endpoint enable-offline-docs disable-fastapi-docs kv-cache-metrics
    cudagraph-metrics enable-mfu-metrics enable-layerwise-nvtx-tracing enable-logging-iteration-details
    aggregate-engine-logging enable-ssl-refresh use-tqdm-on-load speculative-disable-mqa-scorer
    disable-logprobs-during-spec-decoding guided-decoding-disable-fallback data-parallel-hybrid-lb
    data-parallel-external-lb disable-nccl-for-dp-synchronization fully-sharded-loras enable-lora-bias
    disable-mm-preprocessor-cache interleave-mm-strings skip-mm-profiling enable-multimodal-encoder-data-parallel
    language-model-only allow-deprecated-quantization trust-request-chat-template enable-log-deltas
"""
_WITH_VALUE = """
    gpu-memory-utilization kv-cache-memory-bytes swap-space cpu-offload-gb num-gpu-blocks-override block-size
    prefix-caching-hash-algo mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size kv-offloading-size
    kv-offloading-backend max-seq-len-to-capture max-context-len-to-capture num-scheduler-steps num-lookahead-slots
    scheduler-delay-factor delay-factor preemption-mode max-num-partial-prefills max-long-partial-prefills
    long-prefill-token-threshold stream-interval max-paddings distributed-executor-backend
    max-parallel-loading-workers all2all-backend eplb-config num-redundant-experts expert-placement-strategy
    ubatch-size dbo-decode-token-threshold dbo-prefill-token-threshold cp-kv-cache-interleave-size master-addr
    master-port node-rank data-parallel-rank data-parallel-start-rank data-parallel-size-local data-parallel-address
    data-parallel-rpc-port data-parallel-backend compilation-config optimization-level performance-mode
    attention-backend attention-config kernel-config moe-backend profiler-config max-cudagraph-capture-size
    speculative-draft-tensor-parallel-size speculative-max-model-len max-log-len uvicorn-log-level log-config-file
    disable-access-log-for-endpoints h11-max-incomplete-event-size h11-max-header-count
    show-hidden-metrics-for-version otlp-traces-endpoint collect-detailed-traces safetensors-load-strategy
    model-loader-extra-config pt-load-map-location guided-decoding-backend max-loras max-lora-rank
    lora-extra-vocab-size lora-dtype max-cpu-loras max-prompt-adapters max-prompt-adapter-token
    limit-mm-per-prompt media-io-kwargs mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type
    mm-shm-cache-max-object-size-mb mm-encoder-tp-mode mm-encoder-attn-backend video-pruning-rate
    allowed-local-media-path fingerprint-mode
"""

_ALL: Sequence[ForeignFlag] = [
    *_let_pass("nothing", _SWITCHES),
    *_let_pass("one", _WITH_VALUE),
    *_let_pass("many", "cuda-graph-sizes cudagraph-capture-sizes ignore-patterns allowed-media-domains"),
    *_always_so("enable-auto-tool-choice enable-chunked-prefill disable-log-requests disable-uvicorn-access-log"),
    *_always_so("enable-reasoning"),
    *_one_device("tensor-parallel-size pipeline-parallel-size decode-context-parallel-size", "one device"),
    *_one_device("prefill-context-parallel-size", "one device"),
    *_one_device("data-parallel-size api-server-count nnodes", "one process"),
    # which weights
    ForeignFlag("revision", "one", _REVISION, _among("main")),
    ForeignFlag("code-revision", "one", _REVISION, _among("main")),
    ForeignFlag("tokenizer-revision", "one", _REVISION, _among("main")),
    ForeignFlag("tokenizer-mode", "one", "outpace reads tokenizer.json", _among("auto", "hf", "fast", "slow")),
    ForeignFlag(
        "load-format", "one", "outpace finds out what the files are", _among("auto", "safetensors", "hf", "gguf")
    ),
    ForeignFlag("config-format", "one", "outpace reads config.json", _among("auto", "hf")),
    ForeignFlag("download-dir", "one", "set HF_HUB_CACHE to that folder"),
    ForeignFlag("hf-token", "one", "set HF_TOKEN, which other users of the machine cannot read off the command line"),
    ForeignFlag("hf-config-path", "one", _CONFIG),
    ForeignFlag("hf-overrides", "one", _CONFIG, _empty),
    ForeignFlag("rope-scaling", "one", _CONFIG, _among("null", "none", "{}")),
    ForeignFlag("rope-theta", "one", _CONFIG),
    _switch("disable-sliding-window", _CONFIG),
    ForeignFlag("override-attention-dtype", "one", _CONFIG),
    ForeignFlag("model-impl", "one", "outpace takes its own layers where it has them", _among("auto", "vllm")),
    ForeignFlag("qlora-adapter-name-or-path", "one", _LORA),
    _switch("enable-lora", _LORA),
    ForeignFlag("lora-modules", "many", _LORA),
    ForeignFlag("default-mm-loras", "one", _LORA),
    ForeignFlag("long-lora-scaling-factors", "one", _LORA),
    _switch("enable-prompt-adapter", _PROMPT_ADAPTER),
    ForeignFlag("prompt-adapters", "many", _PROMPT_ADAPTER),
    # how it is run
    ForeignFlag("task", "one", "outpace generates text", _among("auto", "generate")),
    ForeignFlag("runner", "one", "outpace generates text", _among("auto", "generate")),
    ForeignFlag("convert", "one", "outpace generates text", _among("auto", "none")),
    ForeignFlag("pooler-config", "one", "outpace generates text", _among("null")),
    ForeignFlag("override-pooler-config", "one", "outpace generates text", _among("null")),
    ForeignFlag("device", "one", "outpace computes on the CPU", _among("auto", "cpu")),
    ForeignFlag(
        "kv-cache-dtype", "one", "the cache keeps keys and values as computed, because rounding them changes answers",
        _among("auto"),
    ),
    ForeignFlag("scheduling-policy", "one", "requests are served in order of arrival", _among("fcfs")),
    ForeignFlag("scheduler-cls", "one", _CODE),
    ForeignFlag("worker-cls", "one", _CODE, _among("auto")),
    ForeignFlag("worker-extension-cls", "one", _CODE, _among("")),
    ForeignFlag("io-processor-plugin", "one", _CODE),
    ForeignFlag("additional-config", "one", "outpace has no platform plugins", _empty),
    ForeignFlag("override-neuron-config", "one", "outpace computes on the CPU", _empty),
    ForeignFlag("kv-transfer-config", "one", _SPREAD, _among("null")),
    ForeignFlag("kv-events-config", "one", _SPREAD, _among("null")),
    ForeignFlag("ec-transfer-config", "one", _SPREAD, _among("null")),
    ForeignFlag("weight-transfer-config", "one", _SPREAD, _among("null")),
    _switch("headless", _SPREAD),
    _switch("grpc", "outpace speaks HTTP"),
    # speculation
    ForeignFlag("typical-acceptance-sampler-posterior-threshold", "one", _TYPICAL, _number(0.09)),
    ForeignFlag("typical-acceptance-sampler-posterior-alpha", "one", _TYPICAL, _number(0.3)),
    # what answers look like
    ForeignFlag(
        "logprobs-mode", "one", "it is a parameter of a request here: logprobs_mode", _among("raw_logprobs")
    ),
    ForeignFlag("logits-processors", "many", _CODE),
    ForeignFlag("logits-processor-pattern", "one", _CODE),
    ForeignFlag("reasoning-parser-plugin", "one", _CODE, _among("")),
    ForeignFlag("reasoning-config", "one", "--reasoning-parser NAME is all there is", _empty),
    ForeignFlag("tool-parser-plugin", "one", _CODE, _among("")),
    ForeignFlag("tool-server", "one", "outpace calls no tools itself: the client does"),
    _switch("exclude-tools-when-tool-choice-none", "leave `tools` out of the requests that must not see them"),
    _switch("return-tokens-as-token-ids", "tokens are shown as text; a request may ask for their ids"),
    _switch("enable-force-include-usage", "a request asks for it with stream_options={'include_usage': true}"),
    _switch("tokens-only", _TEXT_ONLY),
    _switch("skip-tokenizer-init", _TEXT_ONLY),
    _switch("enable-prompt-embeds", _TEXT_ONLY),
    _switch("enable-mm-embeds", _TEXT_ONLY),
    _switch("enable-return-routed-experts", _TEXT_ONLY),
    ForeignFlag("response-role", "one", "answers are the assistant's", _among("assistant")),
    ForeignFlag(
        "chat-template-content-format", "one", "the parts of a message are joined to one text",
        _among("auto", "string"),
    ),
    ForeignFlag(
        "default-chat-template-kwargs", "one", "requests give chat_template_kwargs", _empty
    ),
    ForeignFlag(
        "structured-outputs-config", "one", "there is one implementation of structured outputs and no settings of it",
        _json_with("backend", "disable_fallback", "enable_in_reasoning"),
    ),
    _switch("guided-decoding-disable-any-whitespace", "write the white space into a grammar"),
    _switch("guided-decoding-disable-additional-properties", "write additionalProperties: false into the schema"),
    # who may ask, and how
    ForeignFlag("ssl-keyfile", "one", _TLS),
    ForeignFlag("ssl-certfile", "one", _TLS),
    ForeignFlag("ssl-ca-certs", "one", _TLS),
    ForeignFlag("ssl-cert-reqs", "one", _TLS, _number(0)),
    ForeignFlag("ssl-ciphers", "one", _TLS),
    ForeignFlag("uds", "one", "outpace listens on TCP: use --host and --port"),
    ForeignFlag("middleware", "one", _CODE),
    _switch("allow-credentials", "keys travel in the Authorization header, which needs no cookies"),
    ForeignFlag("allowed-methods", "one", "all methods that there are; a proxy may allow fewer", _json(["*"])),
    ForeignFlag("allowed-headers", "one", "all headers; a proxy may allow fewer", _json(["*"])),
]  # fmt: skip

FLAGS: Mapping[str, ForeignFlag] = {flag.name: flag for flag in _ALL}
"""{name without leading hyphens: flag}"""

SHORT: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-q": "--quantization",
    "-O": "--optimization-level",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-spec-draft-tp": "--speculative-draft-tensor-parallel-size",
}
"""vLLM's short names, in full."""

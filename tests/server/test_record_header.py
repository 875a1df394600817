"""The first line of recorded answers, of an engine that was really built, and who may go on from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outpace.async_llm import AsyncLLM
from outpace.build import Built, build
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import CheckpointError, UnsupportedModel
from outpace.server.record_header import record_header
from outpace.server.recording import Recorder
from outpace.train.data.recorded import newest_header
from outpace.train.data.sources import read_records
from tests.asynchronous import LONGEST_WAIT, make_llm, run
from tests.engine.fakes import HistoryModel
from tests.server.calling import CHAT, USER, client_of, post
from tests.train.tiny import World, save_target


def built_from(folder: Path) -> Built:
    config = EngineConfig(str(folder), quantization="none", threads=1, max_model_len=256)
    return build(config, [SpeculativeConfig(method="suffix")])


def test_answers_of_a_built_engine_are_records_for_its_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = save_target(tmp_path / "own"), save_target(tmp_path / "other", seed=4)
    monkeypatch.chdir(tmp_path)
    llm = AsyncLLM(built_from(Path("own")))
    recorder = Recorder(tmp_path, 10**6, record_header(llm))

    async def main() -> None:
        async with client_of(llm, recorder=recorder) as client:
            found = await post(client, CHAT, messages=USER, max_tokens=7, return_token_ids=True)
            recorder.close(LONGEST_WAIT)
            expected = [(found["prompt_token_ids"], found["choices"][0]["token_ids"])]
            assert list(read_records(str(tmp_path), World(own).identity)) == expected

    run(main())
    header = newest_header(tmp_path)
    assert header["engine"] == {"model": str(own), "quantization": "none", "dtype": "auto", "kernels": "native"}
    assert header["drafters"] == [{"method": "suffix"}]
    assert json.loads(next(tmp_path.glob("*.jsonl")).read_text().splitlines()[0]) == header
    with pytest.raises(CheckpointError, match=r"was made for own .*not for other"):
        list(read_records(str(tmp_path), World(other).identity))


def test_models_without_layers_of_our_own_are_not_recorded() -> None:
    with pytest.raises(UnsupportedModel, match="--record is not possible with stand-in"):
        record_header(make_llm(HistoryModel()))

"""A better head into a running server: what is taken, what is refused, and that answers stay the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from outpace.async_llm import AsyncLLM
from outpace.build import build
from outpace.cli.main import main as outpace_main
from outpace.config import EngineConfig, SpeculativeConfig
from outpace.errors import InvalidParameter
from outpace.server.arguments import resolve
from outpace.server.record_header import record_header
from outpace.server.recording import Recorder
from outpace.server.settings import ServerSettings
from outpace.train.data.recorded import newest_header
from outpace.train.identity import Identity
from outpace.train.kinds.eagle3 import Eagle3, Eagle3Options
from outpace.train.kinds.early_exit import EarlyExit
from outpace.train.result import RESULT, weights_digest
from tests.asynchronous import LONGEST_WAIT, run
from tests.server.calling import COMPLETIONS, client_of, events, listening, post, refused
from tests.train.tiny import ENGINE, EXIT, World, save_target

METHODS = ("eagle3", "early_exit")
DRAFTER = "/v1/drafter"
BODY = {"prompt": [20, 40, 60], "max_tokens": 80, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(save_target(tmp_path_factory.mktemp("model") / "tiny"))


def save_head(world: World, method: str, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    vocab = torch.arange(0, world.material.vocab_size, 2)
    kind = Eagle3(world.material, vocab, Eagle3Options()) if method == "eagle3" else EarlyExit(world.material, [EXIT])
    with torch.no_grad():
        for weight in kind.module.parameters():
            weight.mul_(1 + 0.01 * torch.randn_like(weight))
    kind.save(folder)
    return folder


class Place:
    """Heads on disk: the old one, and runs that began as it."""

    def __init__(self, world: World, folder: Path, method: str) -> None:
        self.world, self.folder, self.method = world, folder, method
        self.old = save_head(world, method, folder / "old", 0)
        self.runs = folder / "runs"
        self.runs.mkdir()

    def run(self, name: str, *, better: bool = True, seed: int = 1, identity: Identity | None = None) -> Path:
        """What `outpace train` leaves behind."""
        folder = self.runs / name
        head = save_head(self.world, self.method, folder / "drafter", seed)
        result = {
            "format": 1,
            "kind": "eagle3" if self.method == "eagle3" else "early-exit",
            "better": better,
            "target": (identity or self.world.identity).as_dict(),
            "said": f"{2 + better}.000 against 2.500",
            "old": {"weights": weights_digest(self.old)},
            "new": {"weights": weights_digest(head)},
        }
        (folder / RESULT).write_text(json.dumps(result))
        return folder

    def llm(self, *more: SpeculativeConfig) -> AsyncLLM:
        named: dict[str, Any] = {"model" if self.method == "eagle3" else "adapter": str(self.old)}
        config = EngineConfig(self.world.engine.model, **ENGINE, speculative_control="fixed")
        own = SpeculativeConfig(method=self.method, num_speculative_tokens=4, **named)
        return AsyncLLM(build(config, [*more, own]))

    @property
    def settings(self) -> ServerSettings:
        return ServerSettings(swap_drafters_from=str(self.runs))


@pytest.fixture(params=METHODS)
def place(world: World, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    return Place(world, tmp_path, request.param)


@pytest.fixture
def heads(world: World, tmp_path: Path) -> Place:
    return Place(world, tmp_path, "eagle3")


@asynccontextmanager
async def serving(place: Place, **options: Any) -> AsyncIterator[tuple[AsyncLLM, httpx.AsyncClient]]:
    llm = place.llm()
    async with client_of(llm, place.settings, **options) as client:
        yield llm, client


async def answer(client: httpx.AsyncClient) -> list[int]:
    found = await post(client, COMPLETIONS, **BODY)
    ids: list[int] = found["choices"][0]["token_ids"]
    return ids


async def plain(client: httpx.AsyncClient) -> list[int]:
    found = await post(client, COMPLETIONS, **BODY, speculative={"enabled": False})
    ids: list[int] = found["choices"][0]["token_ids"]
    return ids


def loaded(llm: AsyncLLM) -> str | None:
    item = llm.built.speculative[-1]
    return item.model if item.method == "eagle3" else item.adapter


def test_a_better_head_is_put_in_place_in_the_middle_of_an_answer(place: Place) -> None:
    async def main() -> None:
        run_folder = place.run("better")
        llm = place.llm()
        async with listening(llm, place.settings) as address, httpx.AsyncClient(base_url=address, timeout=60) as client:
            expected = await plain(client)
            shown = (await client.get(DRAFTER)).json()
            assert shown["drafters"][0]["method"] == place.method
            swapped, tokens = None, []
            async with client.stream("POST", COMPLETIONS, json={**BODY, "stream": True}) as response:
                text = ""
                async for part in response.aiter_text():
                    text += part
                    if swapped is None and text.count("data:") > 4:
                        swapped = await post(client, DRAFTER, run=str(run_folder))
            for event in events(text)[:-1]:
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
            assert tokens == expected
            assert swapped is not None
            name = "model" if place.method == "eagle3" else "adapter"
            assert swapped["swapped"][name] == str(run_folder / "drafter") == loaded(llm)
            assert swapped["reason"] == "3.000 against 2.500"
            assert 0 < swapped["memory_bytes"] < 2 * shown["memory_bytes"] + 100_000
            assert await answer(client) == expected
            usage = (await post(client, COMPLETIONS, **BODY))["metrics"]["speculative_decoding"]
            assert usage["num_draft_tokens"] > 0

    run(main())


def test_a_worse_head_is_refused_unless_it_is_forced(place: Place) -> None:
    async def main() -> None:
        worse = place.run("worse", better=False)
        async with serving(place) as (llm, client):
            drafter = llm.built.engine.drafting.drafters[place.method]
            error = await refused(client, DRAFTER, 409, run=str(worse))
            assert error["code"] == "drafter_refused"
            assert "is not better: 2.000 against 2.500" in error["message"]
            assert "the old drafter stays" in error["message"]
            assert llm.built.engine.drafting.drafters[place.method] is drafter
            assert await answer(client) == await plain(client)
            found = await post(client, DRAFTER, run=str(worse), force=True)
            assert found["reason"] == "forced"
            assert llm.built.engine.drafting.drafters[place.method] is not drafter
            assert await answer(client) == await plain(client)

    run(main())


def cut_off(head: Path) -> None:
    path = head / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def not_a_number(head: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    tensors["norm.weight"][3] = torch.nan
    save_file(tensors, head / "model.safetensors", {"format": "pt"})


def other_bits(head: Path) -> None:
    content = bytearray((head / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (head / "model.safetensors").write_bytes(content)


def no_config(head: Path) -> None:
    (head / "config.json").write_text("{")


def other_shape(head: Path) -> None:
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**config, "hidden_size": 52, "target_hidden_size": 52}))


def test_a_corrupt_head_is_refused_and_the_old_one_drafts_on(place: Place) -> None:
    """Forced or not. That one bit of a weight is another can be told by what was measured alone."""

    async def main() -> None:
        async with serving(place) as (llm, client):
            before, expected = llm.built.engine.drafting.drafters[place.method], await plain(client)
            for damage in (cut_off, not_a_number, no_config, other_shape, other_bits):
                folder = place.run(damage.__name__)
                damage(folder / "drafter")
                for force in (False, True)[: 1 if damage is other_bits else 2]:
                    error = await refused(client, DRAFTER, 409, run=str(folder), force=force)
                    assert error["message"].startswith("the old drafter stays: ")
            assert llm.built.engine.drafting.drafters[place.method] is before
            assert loaded(llm) == str(place.old)
            found = await post(client, COMPLETIONS, **BODY)
            assert found["choices"][0]["token_ids"] == expected
            assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
            await post(client, DRAFTER, run=str(place.run("good", seed=3)))

    run(main())


def test_what_is_not_known_to_be_better_here_is_refused(heads: Place, world: World, tmp_path: Path) -> None:
    """No result; measured on another model, or against another head; for a method that is not loaded; no head."""

    async def main() -> None:
        silent = heads.run("silent")
        (silent / RESULT).unlink()
        other = World(save_target(tmp_path / "other", seed=4))
        foreign = heads.run("foreign", identity=other.identity)
        adapter = save_head(world, "early_exit", heads.runs / "adapter", 1)
        damaged = heads.run("damaged")
        (damaged / RESULT).write_text('{"format": 1}')
        (heads.runs / "empty").mkdir()
        async with serving(heads) as (llm, client):
            for folder, message in (
                (silent, "does not say whether it is better"),
                (foreign, "was made for other (weights"),
                (adapter, "is for method 'early_exit', of which no drafter is loaded (loaded: eagle3)"),
                (damaged, "result.json is damaged"),
                (heads.runs / "empty", "holds no head"),
                (heads.runs / "nowhere", "holds no head"),
            ):
                error = await refused(client, DRAFTER, 409, run=str(folder))
                assert message in error["message"], error
            first, second = heads.run("first"), heads.run("second", seed=2)
            await post(client, DRAFTER, run=str(first))
            error = await refused(client, DRAFTER, 409, run=str(second))
            assert "measured against another head than the one that drafts here" in error["message"]
            assert loaded(llm) == str(first / "drafter")

    run(main())


def test_heads_come_from_one_folder_alone(heads: Place, tmp_path: Path) -> None:
    async def main() -> None:
        outside = heads.run("better").rename(tmp_path / "outside")
        (heads.runs / "link").symlink_to(outside)
        async with serving(heads) as (llm, client):
            for path in (outside, heads.runs / "link", heads.runs / ".." / "outside", tmp_path / "nowhere"):
                error = await refused(client, DRAFTER, 403, run=str(path), force=True)
                assert "is not below" in error["message"]
            error = await refused(client, DRAFTER, run=5)
            assert error["param"] == "run"
            error = await refused(client, DRAFTER, run="x", forced=True)
            assert error["code"] == "unknown_parameter"
            assert loaded(llm) == str(heads.old)
        async with client_of(heads.llm(), ServerSettings()) as client:
            error = await refused(client, DRAFTER, 403, run=str(heads.runs))
            assert "start it with --swap-drafters-from DIR" in error["message"]

    run(main())


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a\0b", "x" * 300, "circle/x"])
def test_names_that_no_folder_can_have_are_refused(heads: Place, name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        (heads.runs / "circle").symlink_to(heads.runs / "circle")
        async with serving(heads) as (llm, client):
            run_name = name if name.startswith("~") else f"{heads.runs}/{name}"
            error = await refused(client, DRAFTER, 409, run=run_name)
            assert error["message"].startswith("the old drafter stays: ")
            assert len(error["message"]) < 600
            assert loaded(llm) == str(heads.old)

    run(main())
    assert not any(record.exc_info for record in caplog.records)


def test_a_head_behind_a_link_out_of_the_folder_is_refused(heads: Place, tmp_path: Path) -> None:
    async def main() -> None:
        folder = heads.run("better")
        (folder / "drafter").rename(tmp_path / "elsewhere")
        (folder / "drafter").symlink_to(tmp_path / "elsewhere")
        async with serving(heads) as (llm, client):
            error = await refused(client, DRAFTER, 403, run=str(folder), force=True)
            assert "is not below" in error["message"]
            assert loaded(llm) == str(heads.old)

    run(main())


def test_one_at_a_time(heads: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        folder = heads.run("better")
        async with serving(heads) as (llm, client):
            begun, go_on = asyncio.Event(), asyncio.Event()
            replace = llm.replace_drafter

            async def slowly(settings: SpeculativeConfig) -> None:
                begun.set()
                await go_on.wait()
                await replace(settings)

            monkeypatch.setattr(llm, "replace_drafter", slowly)
            first = asyncio.ensure_future(post(client, DRAFTER, run=str(folder)))
            await begun.wait()
            error = await refused(client, DRAFTER, 409, run=str(folder))
            assert "another drafter is being put in place" in error["message"]
            assert await answer(client) == await plain(client)
            go_on.set()
            assert (await first)["swapped"]["method"] == "eagle3"

    run(main())


def test_keys_guard_it(heads: Place) -> None:
    async def main() -> None:
        settings = ServerSettings(swap_drafters_from=str(heads.runs), api_keys=("secret",))
        async with client_of(heads.llm(), settings) as client:
            await refused(client, DRAFTER, 401, run="x")
            assert (await client.get(DRAFTER)).status_code == 401

    run(main())


def test_records_name_the_head_that_drafts(heads: Place, tmp_path: Path) -> None:
    async def main() -> None:
        llm, folder = heads.llm(), heads.run("better")
        recorder = Recorder(tmp_path, 10**6, record_header(llm))
        async with client_of(llm, heads.settings, recorder=recorder) as client:
            await answer(client)
            await post(client, DRAFTER, run=str(folder))
            await answer(client)
        recorder.close(LONGEST_WAIT)
        files = sorted(tmp_path.glob("answers-*.jsonl"))
        named = [json.loads(path.read_text().splitlines()[0])["drafters"][0]["model"] for path in files]
        assert named == [str(heads.old), str(folder / "drafter")]
        assert newest_header(tmp_path)["drafters"][0]["model"] == named[1]

    run(main())


def test_the_command(heads: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        better, worse = heads.run("better"), heads.run("worse", better=False)
        settings = ServerSettings(swap_drafters_from=str(heads.runs), api_keys=("secret",))
        async with listening(heads.llm(), settings) as address:

            async def command(*words: str) -> tuple[int, str, str]:
                code = await asyncio.to_thread(outpace_main, ["swap", address, *words])
                captured = capsys.readouterr()
                return code, captured.out, captured.err

            code, _, err = await command(str(better))
            assert code == 1
            assert "refused (401): a valid API key is needed" in err
            monkeypatch.setenv("OUTPACE_API_KEY", "secret")
            code, _, err = await command(str(worse))
            assert code == 1
            assert "refused (409): the old drafter stays" in err
            code, out, err = await command(str(better), "--api-key", "secret")
            assert code == 0, err
            assert json.loads(out)["swapped"]["model"] == str(better / "drafter")
            assert f"eagle3 now drafts with {better / 'drafter'} (3.000 against 2.500)" in err
            code, out, _ = await command(str(worse), "--force")
            assert json.loads(out)["reason"] == "forced"

    run(main())
    assert outpace_main(["swap", "http://127.0.0.1:1", "x"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    for url in ("localhost:8000", "http://host:abc", "http://[::1", "http://", "http://host:99999"):
        assert outpace_main(["swap", url, "x"]) == 2
        assert "write http://HOST:PORT" in capsys.readouterr().err
    assert outpace_main(["swap", "http://127.0.0.1:1/a b", "x"]) == 1
    assert "is no outpace server" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"--swap-drafters-from .*nowhere' is not possible: there is no such"):
        resolve(["--swap-drafters-from", str(tmp_path / "nowhere")], {})

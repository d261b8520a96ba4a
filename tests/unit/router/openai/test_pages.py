"""The embedded pages: nothing from elsewhere, no key, and what a real browser makes of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from protocol.ids import Role
from router.auth.keys import hashed, new_key
from router.pages import PAGES, content_policy
from tests.support.router_front_ends import FrontEnds, MakeFrontEnds, letters
from tests.support.stub_workers import StubFleet

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FOLDER = Path(__file__).parents[4] / "router" / "pages"


@pytest.mark.parametrize("name", PAGES.values())
def test_a_page_is_whole_by_itself(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert re.findall(r'(?:src=|@import|style="| on[a-z]+=|innerHTML|\beval\b)', text) == []
    policy = content_policy(text)
    assert policy.startswith("default-src 'none'; ")
    assert len(re.findall(r"(?:script|style)-src 'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2


async def test_pages_need_no_key_and_what_they_call_does(
    fleet: StubFleet, make_front_ends: MakeFrontEnds, tmp_path: Path
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- name: ann\n  hash: '{hashed(new_key())}'\n")
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, api_keys_file=str(file)) as front_ends:
        for path in PAGES:
            async with front_ends.http.get(front_ends.url + path) as response:
                assert response.status == 200
                assert response.headers["content-type"].startswith("text/html")
                assert "sha256-" in response.headers["content-security-policy"]
        async with front_ends.http.get(front_ends.url + "/openapi.json") as response:
            assert response.status == 401


async def test_they_can_be_turned_off(fleet: StubFleet, make_front_ends: MakeFrontEnds) -> None:
    await fleet.add(Role.DECODE)
    async with make_front_ends(fleet, pages_enabled=False) as front_ends:
        for path in PAGES:
            async with front_ends.http.get(front_ends.url + path) as response:
                assert response.status == 404


class Tab:
    """A page in a browser, over its debugging protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._id = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        self._id += 1
        await self._socket.send_json({"id": self._id, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=30)
            if message.get("id") == self._id:
                return message["result"]
            level = message["params"].get("entry", {}).get("level", "error")
            named = message["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")
            if named and level in ("error", "warning"):
                self.complaints.append(json.dumps(message["params"]))

    async def value(self, expression: str) -> Any:
        options = {"awaitPromise": True, "returnByValue": True}
        result = await self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        async with asyncio.timeout(60):
            while not await self.value(expression):
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def opened(url: str, profile: Path, http: aiohttp.ClientSession) -> AsyncIterator[Tab]:
    assert BROWSER is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    browser = await asyncio.create_subprocess_exec(
        *(BROWSER, *options, f"--user-data-dir={profile}", "about:blank"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert browser.stderr is not None
        async with asyncio.timeout(60):
            while not (found := re.search(rb"ws://([\d.:]+)/", await browser.stderr.readline())):
                pass
        address = f"http://{found[1].decode()}/json/new?about:blank"
        async with http.put(address) as response:
            target = await response.json(content_type=None)
        async with http.ws_connect(target["webSocketDebuggerUrl"]) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log"):
                await tab.call(f"{domain}.enable")
            await tab.call("Page.navigate", url=url)
            yield tab
    finally:
        browser.terminate()
        await browser.wait()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
async def test_in_a_real_browser(front_ends: FrontEnds, tmp_path: Path) -> None:
    for worker in front_ends.fleet.workers:
        worker.script = lambda s: [*letters("Hi <b>there</b>"), 2]
        worker.delay_s = 0.01
    async with opened(front_ends.url + "/", tmp_path, front_ends.http) as tab:
        await tab.until("document.querySelectorAll('#model option').length == 1")
        await tab.value("$('prompt').value = 'hello'; $('form').requestSubmit()")
        await tab.until("document.querySelectorAll('figure').length == 2")
        tokens = "[...document.querySelectorAll('.token')]"
        assert await tab.value(f"{tokens}.map(t => t.textContent).join('')") == "Hi <b>there</b>"
        assert await tab.value(f"{tokens}.every(t => /^[0-9.]+ ms$/.test(t.title))")
        captions = await tab.value(
            "[...document.querySelectorAll('figcaption')].map(c => c.textContent)"
        )
        assert re.match(r"first token \d+ ms, then [\d.]+ ms each, longest", captions[0])
        assert captions[0].endswith(f"{len(letters('Hi <b>there</b>')) + 1} out")
        assert captions[1].startswith("timeline: ")
        assert "decode" in captions[1]
        assert await tab.value("document.querySelectorAll('svg')[1].children.length") >= 3
        await tab.call("Page.navigate", url=front_ends.url + "/docs")
        await tab.until("document.querySelectorAll('details').length > 10")
        await tab.value(
            "const [chat] = [...document.querySelectorAll('details')].filter("
            "d => d.textContent.includes('POST /tokenize'));"
            "chat.querySelector('button').click(); window.chat = chat"
        )
        await tab.until("window.chat.querySelector('pre').textContent.startsWith('200')")
        assert tab.complaints == []

"""The dashboard of a real coordinator, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from urllib.parse import urlencode

import pytest

from coordinator.api.dashboard import token_of, url_in
from protocol.errors import ErrorCode, HetnodeError
from tests.builders import keyed, spec_of
from tests.support.coordinator_process import running
from tests.support.dashboard import EventReader, address_of, ask, open_socket

A, B = (keyed(i) for i in range(2))
LOOPBACK, EVERYWHERE = "127.0.0.1:0", "0.0.0.0:0"
PAGES = ("/", "/swarm", "/rounds", "/round/1", "/network", "/leaderboard", f"/peer/{A.peer}")


async def test_every_page_is_there_with_its_files_and_a_strict_policy(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        files = set()
        for path in PAGES:
            page = await ask(tmp_path, path)
            assert page.status == 200, path
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["referrer-policy"] == "no-referrer"
            assert page.headers["cache-control"] == "no-store"
            assert not re.search(
                r"<script(?! type=\"module\" src=)|<style|style=|https?://(?!www.w3.org)", page.text
            )
            files |= set(re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text))
        assert len(files) == len(PAGES) + 2
        for file in files:
            found = await ask(tmp_path, file)
            assert found.status == 200, file
            assert "immutable" in found.headers["cache-control"]
            for imported in re.findall(r'from "(\.[^"]+)"', found.text):
                folder = file.rpartition("/")[0]
                target = f"{folder.rpartition('/')[0]}/{imported[3:]}" if imported.startswith("../") else None
                target = target or f"{folder}/{imported[2:]}"
                assert (await ask(tmp_path, target)).status == 200, target


async def test_the_charts_come_from_the_installed_package(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        static = re.search(r'data-static="([^"]+)"', (await ask(tmp_path, "/")).text)
        assert static
        found = await ask(tmp_path, f"{static[1]}/Chart.bundle.js")
        assert found.headers["content-encoding"] == "gzip"
        assert b"Chart.js" in found.body[:200]


async def test_nothing_else_is_there(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        for path in (
            "/nothing",
            "/static/x/dashboard.css",
            "/static/../authority.key",
            "/api/nothing",
            "/round/x",
        ):
            assert (await ask(tmp_path, path)).status == 404, path
        for path in ("/api/round?round=99", "/api/round?round=x"):
            assert (await ask(tmp_path, path)).status == 404, path
        hostile = await ask(tmp_path, "/peer/%3Cscript%3Ealert(1)%3C/script%3E")
        assert b"<script>alert" not in hostile.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"])
async def test_it_is_read_only(tmp_path: Path, method: str) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        for path in ("/", "/api/status", "/events"):
            assert (await ask(tmp_path, path, method)).status == 405


async def test_a_foreign_name_for_this_machine_reads_nothing(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        for path in ("/", "/api/status", "/events", "/login"):
            assert (await ask(tmp_path, path, host="evil.example")).status == 421
            assert (await ask(tmp_path, path, host="evil.example/login?")).status in (400, 421)


async def test_beyond_loopback_readers_need_the_token(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=EVERYWHERE):
        token = token_of(tmp_path)
        assert (await ask(tmp_path, "/")).headers["location"] == "/login"
        for path in ("/api/status", "/api/losses", "/events"):
            assert (await ask(tmp_path, path)).status == 401
        # The Host must not be able to make another path of it.
        assert (await ask(tmp_path, "/api/status", host="x/login?")).status in (400, 401)
        assert (await ask(tmp_path, "/login")).status == 200
        wrong = await ask(tmp_path, "/login", "POST", urlencode({"token": "wrong"}))
        assert wrong.status == 403
        assert "set-cookie" not in wrong.headers
        assert (await ask(tmp_path, "/login", "POST", "token=" + "x" * 100_000)).status == 413
        right = await ask(tmp_path, "/login", "POST", urlencode({"token": token}))
        assert right.status == 303
        cookie = right.headers["set-cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert token not in cookie
        signed_in = cookie.partition(";")[0]
        assert (await ask(tmp_path, "/", cookie=signed_in)).status == 200
        assert (await ask(tmp_path, "/api/status", cookie=signed_in)).json["peers"] == []
        assert (await ask(tmp_path, "/api/status", cookie=f"{signed_in}0")).status == 401


async def test_the_token_is_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running(spec_of(), tmp_path, dashboard=EVERYWHERE):
        await ask(tmp_path, "/login", "POST", urlencode({"token": token_of(tmp_path)}))
    assert "dashboard: http://127.0.0.1:" in caplog.text
    assert token_of(tmp_path) not in caplog.text


async def test_readers_get_the_run_at_once_and_then_each_change(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK) as run:
        reader = await asyncio.to_thread(EventReader, address_of(tmp_path))
        first = await asyncio.to_thread(reader.until, phase="gathering")
        assert first["message"].startswith("waiting for")
        await run.join(A)
        await run.join(B)
        training = await asyncio.to_thread(reader.until, phase="training")
        assert training["activities"] == {"trains": 2}
        assert training["events"][0]["text"]
        status = (await ask(tmp_path, "/api/status")).json
        assert {each["peer"] for each in status["peers"]} == {A.peer, B.peer}
        assert (await ask(tmp_path, f"/api/peer?peer={A.peer}")).json["peer"]["activity"] == "trains"
        assert (await ask(tmp_path, "/api/peer?peer=nobody")).json["peer"] is None
        assert set((await ask(tmp_path, "/api/predictions")).json) == {"0", "1"}
        reader.close()


async def test_the_end_of_the_coordinator_ends_the_streams(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        reader = await asyncio.to_thread(EventReader, address_of(tmp_path))
        await asyncio.to_thread(reader.until, phase="gathering")
        idle = open_socket(address_of(tmp_path))
    while (event := await asyncio.to_thread(reader.next)) is not None:
        assert event[0] in ("run", "beat")
    assert idle.recv(1) == b""
    assert url_in(tmp_path) is None
    idle.close()
    reader.close()


async def test_nobody_looks(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK):
        assert url_in(tmp_path) is not None
    assert url_in(tmp_path) is None


async def test_a_port_in_use_is_one_message_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path / "one", dashboard=LOOPBACK):
        host, port = address_of(tmp_path / "one")
        with pytest.raises(HetnodeError) as error:
            async with running(spec_of(), tmp_path / "other", dashboard=f"{host}:{port}"):
                pass
        assert error.value.code is ErrorCode.PORT_IN_USE
        assert not (tmp_path / "other").exists()


async def test_explanations_are_those_of_the_command_line(tmp_path: Path) -> None:
    async with running(spec_of(), tmp_path, dashboard=LOOPBACK) as run:
        now = (await ask(tmp_path, "/api/explain")).json
        assert now["title"]["cause"]["code"] == "peers-lacking"
        await run.join(A)
        await run.join(B)
        reader = await asyncio.to_thread(EventReader, address_of(tmp_path))
        await asyncio.to_thread(reader.until, phase="training")
        reader.close()
        peer = (await ask(tmp_path, f"/api/explain?question={A.peer}")).json
        assert (peer["title"]["code"], peer["title"]["peers"]) == ("peer", [A.peer])
        assert all(isinstance(number, int) for each in peer["statements"] for number in each["events"])
        title = (await ask(tmp_path, "/api/explain?question=1")).json["title"]
        assert (title["code"], title["rounds"], title["figures"]["decided"]) == ("round", [1], 0)
        for question in ("99", "nobody", "%3Cscript%3E" + "x" * 10_000):
            refused = await ask(tmp_path, f"/api/explain?question={question}")
            assert refused.status == 404, question
            assert len(refused.json["error"]) <= 400


PUBLIC = (
    *("/api/status", "/api/predictions", "/api/explain", "/api/losses", "/api/speed", "/api/traffic"),
    *("/api/rounds", "/api/round?round=1", "/api/credits", "/api/explain?question=1"),
    *(
        f"/api/peer?peer={A.peer}",
        f"/api/explain?question={A.peer}",
        "/api/explain?question=event%203%204",
    ),
)


@pytest.mark.parametrize("address", [LOOPBACK, EVERYWHERE], ids=["public", "with-token"])
async def test_readers_without_a_token_learn_the_address_of_nobody(tmp_path: Path, address: str) -> None:
    """Nor does a page, a record or the stream tell what addresses a peer had, or what was tried there."""
    async with running(spec_of(), tmp_path, dashboard=address) as run:
        await run.join(A, endpoint="203.0.113.7:49321")
        await run.join(B, endpoint="home.example.org:49322")
        headers = {}
        if address == EVERYWHERE:
            form = urlencode({"token": token_of(tmp_path)})
            kind = "application/x-www-form-urlencoded"
            login = await ask(tmp_path, "/login", "POST", form, content_type=kind)
            headers["cookie"] = login.headers["set-cookie"].partition(";")[0]
        told = [await ask(tmp_path, path, **headers) for path in (*PAGES, *PUBLIC)]
        assert [each.text for each in told if each.status != 200] == []
        reader = await asyncio.to_thread(EventReader, address_of(tmp_path), headers)
        stream = str(await asyncio.to_thread(reader.until, phase="training"))
        reader.close()
        assert "joined as replica" in stream
        texts = [*(each.text for each in told), stream]
        for private in ("203.0.113.7", "49321", "home.example.org", "49322"):
            assert any(private in text for text in texts) is bool(headers)

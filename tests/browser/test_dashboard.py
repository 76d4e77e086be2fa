"""The dashboard of a real swarm in a real browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.api.dashboard import token_of, url_for_readers, url_in
from coordinator.ops.dashboard.about import ABOUT_FILE, SAMPLES_FILE
from protocol.types import Role
from tests.builders import spec_of
from tests.support.browser import Browser
from tests.support.processes import COORDINATOR, ProcessSwarm

pytestmark = [pytest.mark.browser, pytest.mark.swarm]

MEMBERS = {"full": Role.REPLICA, "first": Role.STAGE, "last": Role.STAGE}
HOSTILE = "<img src=x onerror='window.isHarmed = true'>"
TABS_SCROLL = "const tabs = document.querySelector('.tabs'); return tabs.scrollWidth > tabs.clientWidth"
SPEC = spec_of(replicas=1, pipelines=1, rounds=100_000)


def test_a_killed_node_is_said_without_a_reload(tmp_path: Path, browser: Browser) -> None:
    with ProcessSwarm(SPEC, tmp_path, MEMBERS) as swarm:
        swarm.start_coordinator("--dashboard", "127.0.0.1:0")
        url = url_in(swarm.run)
        assert url is not None
        browser.open(url)
        browser.wait_for("h1", "Gathering peers")
        browser.run("window.isSamePage = true")
        for name in MEMBERS:
            swarm.start_node(name)
        browser.wait_for("h1", "Round ")
        browser.wait_for(".live", "live")
        browser.wait_for(".chart canvas[aria-label*='replica 1']")  # the losses of a round
        browser.wait_for(".legend", "replica 1")

        every = ("/", "/swarm", "/rounds", "/round/1", "/network", "/leaderboard")
        for path in every:
            browser.open(url.rstrip("/") + path)
            browser.wait_for(".live.on")
            browser.wait_for("#page .card, #page .tile")
            for scheme, width in (("light", 1280), ("dark", 360)):
                browser.prefer(scheme)
                browser.resize(width, 800)
                assert not any((browser.is_too_wide, browser.run(TABS_SCROLL))), (path, width)
            browser.resize(1280, 1000)
        browser.open(f"{url}leaderboard")
        browser.wait_for(".find input[name=find]")
        browser.run("const f = document.querySelector('.find'); f.find.value = 'nobody'; f.requestSubmit()")
        browser.wait_for("#page .card", 'No peer has "nobody"')
        browser.open(f"{url}leaderboard")
        browser.wait_for(".find a", "my node: nobody")
        browser.open(f"{url}swarm")
        browser.wait_for(".member a")
        member = browser.run("return document.querySelector('.member a').href")
        browser.open(member)
        browser.wait_for(".badge", "trains")
        browser.wait_for(".explain .answer", "trains as a")
        check_health_and_reasons(browser, url)
        assert browser.complaints() == []

        browser.open(f"{url}swarm")
        browser.wait_for(".chain-card .badge", "train")
        browser.run("window.isSamePage = true")
        swarm.kill("last")
        browser.wait_for(".member.gone .badge", "gone")
        browser.wait_for(".chain-card.broken .badge", "cannot train")
        browser.wait_for(".groups", "1 gone")
        assert browser.run("return window.isSamePage") is True, "it was not loaded again"
        browser.open(f"{url}peer/{swarm.peer('last')}")
        browser.wait_for(".explain .answer", "is gone")
        browser.run("window.isSamePage = true")

        swarm.kill(COORDINATOR)
        browser.wait_for("#lost", "Connection lost")
        swarm.start_coordinator("--dashboard", url.removeprefix("http://").rstrip("/"))
        browser.wait_for(".live.on", "live")
        assert browser.run("return window.isSamePage") is True


def check_health_and_reasons(browser: Browser, url: str) -> None:
    browser.open(f"{url}round/1")
    browser.wait_for(".explain .answer", "Round 1 took")
    browser.wait_for(".row-head .end", "agreement")
    browser.open(url)
    browser.wait_for(".card-head .badge", "nothing unusual")
    browser.wait_for("th", "norm")
    browser.wait_for(".part-join", "ask the operator")
    browser.run("document.querySelector('.explain').open = true")
    browser.wait_for(".explain .answer", "ound ")


def test_a_pause_and_a_rollback_are_said_and_a_reason_is_only_text(tmp_path: Path, browser: Browser) -> None:
    with ProcessSwarm(SPEC, tmp_path, MEMBERS) as swarm:
        swarm.start_coordinator("--dashboard", "127.0.0.1:0")
        url = url_in(swarm.run)
        assert url is not None
        browser.open(url)
        for name in MEMBERS:
            swarm.start_node(name)
        browser.wait_for("h1", "Round ")
        swarm.wait_round(2, 90)
        command = [sys.executable, "-m", "node"]
        subprocess.run(
            [*command, "run", "pause", str(swarm.run), "--reason", HOSTILE], check=True, timeout=60
        )
        browser.wait_for("h1", "Paused before round")
        browser.wait_for(".hero-message", HOSTILE)
        browser.wait_for(".part-replicas .badge", "paused")
        subprocess.run([*command, "rollback", str(swarm.run), "--to", "0", "--yes"], check=True, timeout=60)
        browser.wait_for(".notice", "restored the initial parameters")
        browser.open(f"{url}rounds")
        browser.wait_for(".badge", "rollback to 0")
        browser.open(browser.run("return document.querySelectorAll('tbody a')[1].href"))
        browser.wait_for(".explain .answer", "is a rollback to round 0")
        browser.wait_for(".sentences", HOSTILE)
        assert browser.run("return [document.images.length, window.isHarmed]") == [1, None]
        subprocess.run([*command, "run", "resume", str(swarm.run)], check=True, timeout=60)
        browser.open(url)
        browser.wait_for(".hero h1", "Round ")
        assert browser.complaints() == []


def test_the_address_with_the_token_signs_in(tmp_path: Path, browser: Browser) -> None:
    with ProcessSwarm(SPEC, tmp_path, {}) as swarm:
        swarm.start_coordinator("--dashboard", "0.0.0.0:0", "--contact", HOSTILE)
        plain, readers = url_in(swarm.run), url_for_readers(swarm.run)
        assert plain is not None
        assert readers is not None
        (swarm.run / ABOUT_FILE).write_text(f"# Title {HOSTILE}\nWords {HOSTILE}\n")
        (swarm.run / SAMPLES_FILE).write_text(f"def {HOSTILE}\n")
        browser.open(plain)
        browser.wait_for("h1", "Sign in")
        browser.wait_for(".about h2", f"Title {HOSTILE}")
        browser.wait_for(".about p", f"Words {HOSTILE}")
        browser.wait_for("#join", f"An invite is needed: {HOSTILE}")
        browser.resize(360, 800)
        assert not browser.is_too_wide
        browser.resize(1280, 1000)
        browser.open("about:blank")
        browser.open(readers)
        browser.wait_for("h1", "Gathering peers")
        browser.wait_for(".about pre", f"def {HOSTILE}")
        assert token_of(swarm.run) not in browser.run("return location.href + document.cookie")
        browser.wait_for(".part-join", f"An invite is needed: {HOSTILE}")
        browser.wait_for(".part-join code", "hetnode join INVITE")
        assert browser.run("return window.isHarmed") is None
        assert browser.complaints() == []

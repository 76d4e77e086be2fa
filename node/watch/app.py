"""``hetnode watch``: the run, the swarm and this machine's node on one live screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import Footer, Static, TabbedContent, TabPane

from node.monitoring.report import RateMeter, Rates
from node.views.status import as_of_note
from node.views.text import as_text, duration, plain
from node.views.watch import node_view, run_view, swarm_view
from node.watch.sources import NodeControl, NodeLook, RunSource
from protocol.errors import HetnodeError
from protocol.server.terminal import visible
from protocol.status import RunPhase, RunStatus

VIEWS = ("run", "swarm", "node", "log")
_TITLES = {"run": "1 Run", "swarm": "2 Swarm", "node": "3 This node", "log": "4 Log"}
_MOST_ROUNDS = 2000
"""Losses of one replica that are kept for its line."""

_HELP = """\
1 2 3 4, Tab, arrows  another view
up, down, wheel       scroll
p                     pause this machine's node: it finishes its
                      round; p again lets it take part again
d                     let this machine's node leave its run
l                     the log of this machine's node
q                     end this view; run and node go on
?                     this help; any key closes it

"waits for": assignment - a place in the plan; plan - that of the next round; \
links - those to its neighbours; neighbour - its next frame; group - the offers of \
the other replicas; payloads - theirs; decision - that of the coordinator; \
checkpoint - one of other peers.
"""


class _Shown(Static):
    """A text on the screen, of which every line is :func:`visible`."""

    def render_line(self, y: int) -> Strip:
        line = super().render_line(y)
        return Strip([each._replace(text=visible(each.text)) for each in line], line.cell_length)


class _Help(ModalScreen[None]):
    """Explains the keys."""

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield _Shown(Text(_HELP))

    def on_key(self) -> None:
        self.dismiss()


class _Question(ModalScreen[bool]):
    """Asks before something that cannot be taken back by one key."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield _Shown(Text(self._question))
            yield _Shown(Text("\ny yes    n no", "bold"))

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)


class WatchApp(App[None]):
    """Shows what `run` and `node` tell, every `interval` seconds, until the user ends it.

    Args:
        run: None where only the node can be asked.
        node: None where no node of the run is on this machine.
    """

    TITLE = "hetnode watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 1; padding: 0 1; background: $primary; color: $text; }
    #note { height: auto; max-height: 3; padding: 0 1; }
    TabbedContent { height: 1fr; }
    TabPane { padding: 0 1; }
    ModalScreen { align: center middle; }
    .dialog { width: 74; max-width: 100%; height: auto; max-height: 90%; padding: 1 2;
              border: round $primary; background: $surface; }
    .dialog Static { width: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause/resume"),
        Binding("d", "leave", "Leave"),
        Binding("l", "show('log')", "Log"),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "quit", "Quit"),
        Binding("tab,right", "turn(1)", "Next view", show=False, priority=True),
        Binding("shift+tab,left", "turn(-1)", "Previous view", show=False, priority=True),
        *(Binding(str(number), f"show('{view}')", view, show=False) for number, view in enumerate(VIEWS, 1)),
    ]

    def __init__(
        self,
        run: RunSource | None,
        node: NodeControl | None,
        interval: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._run_source, self._node, self._interval, self._clock = run, node, interval, clock
        self._losses: dict[int, list[tuple[int, float]]] = {}
        self._meter, self._rates = RateMeter(), Rates()
        self._status: RunStatus | None = None
        self._status_at = 0.0
        self._is_live = self._is_stored = False
        self._trouble: HetnodeError | None = None
        self._look: NodeLook | None = None
        self._node_trouble: HetnodeError | None = None

    def compose(self) -> ComposeResult:
        yield _Shown(id="head")
        yield _Shown(id="note")
        with TabbedContent(initial="run"):
            for view in VIEWS:
                with TabPane(_TITLES[view], id=view), VerticalScroll():
                    yield _Shown(id=f"{view}-text")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._render_all()
        if self._run_source is not None:
            self.run_worker(self._follow_run(self._run_source), name="run")
        if self._node is not None:
            self.run_worker(self._follow_node(self._node), name="node")

    def on_resize(self) -> None:
        self._render_all()

    async def _follow_run(self, source: RunSource) -> None:
        try:
            for index, known in (await source.losses()).items():
                self._losses[index] = list(known)[-_MOST_ROUNDS:]
            while True:
                await self._ask_run(source)
                self._render_all()
                await asyncio.sleep(self._interval)
        finally:
            await source.close()

    async def look_again(self) -> None:
        """Ask run and node now, and show what they tell."""
        if self._run_source is not None:
            await self._ask_run(self._run_source)
        if self._node is not None:
            await self._ask_node(self._node)
        self._render_all()

    async def _ask_run(self, source: RunSource) -> None:
        try:
            self._note_status(await source.status(), live=True)
            self._trouble = None
        except HetnodeError as error:
            self._trouble, self._is_live = error, False
            if self._status is None:
                try:
                    if (stored := await source.stored()) is not None:
                        self._note_status(stored, live=False)
                except HetnodeError as unreadable:
                    self._trouble = unreadable

    def _note_status(self, status: RunStatus, live: bool) -> None:
        self._status, self._is_live, self._is_stored = status, live, not live
        self._status_at = self._clock()
        for index, figures in status.figures.items():
            known = self._losses.setdefault(index, [])
            if not known or known[-1][0] < figures.round_number:
                known.append((figures.round_number, figures.validation_loss))
                del known[:-_MOST_ROUNDS]

    async def _follow_node(self, node: NodeControl) -> None:
        while True:
            await self._ask_node(node)
            self._render_all()
            await asyncio.sleep(self._interval)

    async def _ask_node(self, node: NodeControl) -> None:
        try:
            self._look = await node.look()
            self._node_trouble = None
            self._rates = self._meter.note(self._clock(), self._look.report)
        except HetnodeError as error:
            self._node_trouble = error

    # What is shown

    def _render_all(self) -> None:
        if not self.query("#head"):
            return  # before the first layout, or after the last
        self.query_one("#head", Static).update(self._head())
        note = self.query_one("#note", Static)
        note.display = bool(found := self._note())
        note.update(found)
        width = max(40, self.size.width - 4)
        views = {
            "run": self._run_text,
            "swarm": self._swarm_text,
            "node": self._node_text,
            "log": self._log_text,
        }
        for view, text in views.items():
            pane = self.query_one(f"#{view} VerticalScroll", VerticalScroll)
            follows = view == "log" and pane.scroll_offset.y >= pane.max_scroll_y
            self.query_one(f"#{view}-text", Static).update(text(width))
            if follows:  # who has scrolled up reads
                pane.scroll_end(animate=False)

    def _head(self) -> Text:
        if self._status is None:
            return Text("hetnode watch")
        status = self._status
        name = plain(status.run, 60 if self.size.width > 100 else 22)
        rounds = f"{status.rounds_decided}/{status.spec.rounds}"
        live = "live" if self._is_live else "not connected"
        return Text(f"{name}  {status.phase.value}  {rounds}  {live}", no_wrap=True, overflow="ellipsis")

    def _note(self) -> Text:
        if self._run_source is None:
            return Text("The coordinator's address is not known here: only this node is shown.", "yellow")
        status = self._status
        if self._trouble is None:
            return Text("asking the coordinator ..." if status is None else "")
        if status is None:
            return Text.assemble(
                ("No connection to the coordinator; asking again. ", "bold red"), plain(self._trouble.cause)
            )
        if status.phase is RunPhase.FINISHED:
            return Text("The run is finished, and its coordinator has ended.", "bold green")
        if self._is_stored:
            return as_of_note(status, self._clock())
        ago = duration(self._clock() - self._status_at)
        return Text(
            f"Connection to the coordinator lost {ago} ago; asking again. This is the last status.",
            "bold red",
        )

    def _run_text(self, width: int) -> RenderableType:
        return Text("") if self._status is None else run_view(self._status, self._losses, width)

    def _swarm_text(self, width: int) -> RenderableType:
        own = self._look.report.peer if self._look else ""
        return Text("") if self._status is None else swarm_view(self._status, own)

    def _node_text(self, width: int) -> RenderableType:
        if self._node is None:
            return Text("No node of this run runs on this machine. 'hetnode join' takes part with it.")
        trouble = self._node_trouble
        parts: list[RenderableType] = []
        if trouble is not None:
            parts += [as_text(f"The node does not answer: {trouble.cause}", "bold red"), ""]
        if self._look is not None and trouble is None:
            look = self._look
            parts.append(node_view(look.state, look.report, self._rates, look.gpus, self._status, width))
        return Group(*parts) if parts else Text("asking the node ...")

    def _log_text(self, width: int) -> RenderableType:
        if self._look is None or not self._look.log:
            return Text("No log of a node of this machine is known here.")
        return Text("\n").join(_log_line(line) for line in self._look.log)

    # What the keys do

    def action_turn(self, step: int) -> None:
        if self.screen is not self.screen_stack[0]:
            return  # a question waits for its answer
        tabs = self.query_one(TabbedContent)
        self.action_show(VIEWS[(VIEWS.index(tabs.active) + step) % len(VIEWS)])

    def action_show(self, view: str) -> None:
        self.query_one(TabbedContent).active = view
        pane = self.query_one(f"#{view} VerticalScroll", VerticalScroll)
        pane.focus()
        if view == "log":
            pane.scroll_end(animate=False)

    def action_help(self) -> None:
        self.push_screen(_Help())

    async def action_pause(self) -> None:
        node, look = self._node, self._look
        if node is None or look is None:
            self._say("No node of this run runs on this machine.", "warning")
            return
        if look.state.reason:
            await self._control(node, node.resume, "The node is not paused by hand any more.")
        else:
            await self._control(
                node, node.pause, "The node finishes its round and rests; p lets it take part again."
            )

    def action_leave(self) -> None:
        node = self._node
        if node is None or self._look is None:
            self._say("No node of this run runs on this machine.", "warning")
            return

        async def leave(answer: bool | None) -> None:
            if answer:
                await self._control(node, node.leave, "The node finishes its round and leaves the run.")

        question = (
            "Shall this machine's node leave the run?\n\n"
            "It finishes its round, saves its progress and ends. 'hetnode join' goes on from there."
        )
        self.push_screen(_Question(question), leave)

    async def _control(self, node: NodeControl, action: Callable[[], object], said: str) -> None:
        try:
            await action()  # type: ignore[misc]
        except HetnodeError as error:
            self._say(f"{error.cause} {error.remedy}", "error")
            return
        self._say(said)
        await self._ask_node(node)
        self._render_all()

    def _say(self, sentence: str, severity: str = "information") -> None:
        self.notify(plain(sentence), severity=severity, markup=False)  # type: ignore[arg-type]


def _log_line(line: str) -> Text:
    words = line.split(" ", 3)
    style = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}.get(
        words[2] if len(words) > 3 else "", ""
    )
    return as_text(line, style, most=500)

"""When others need the machine: the decision over time, and what its tools say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.home.guest.guest import Rest
from node.home.guest.idle import CPU_SHARE, GPU_SHARE, IdleRule, Presence, busy_reason, unknown
from node.home.guest.presence import gpu_share, idle_seconds_of_mac, look, sessions_in_use

shares = st.none() | st.floats(0, 1)
presences = st.builds(Presence, st.none() | st.booleans(), shares, shares)
QUIET = 100.0


def play(seen: list[tuple[float, Presence]]) -> list[Rest | None]:
    """The answers of a rule that looks at these times and sees this."""
    now, answers = 0.0, []
    current = Presence()
    rule = IdleRule(lambda: current, lambda: now, QUIET)
    for passed, current in seen:  # noqa: B007  the rule reads it
        now += passed
        answers.append(rule.rest())
    return answers


@given(presences)
def test_what_is_not_known_keeps_no_node_away(presence: Presence) -> None:
    is_needed = (
        presence.at_keyboard is True or (presence.gpu or 0) > GPU_SHARE or (presence.cpu or 0) > CPU_SHARE
    )
    assert bool(busy_reason(presence)) == is_needed
    values = (presence.at_keyboard, presence.gpu, presence.cpu)
    assert bool(unknown(presence)) == any(value is None for value in values)


@given(st.lists(st.tuples(st.floats(0, 200), presences), max_size=30))
def test_a_node_rests_from_the_first_need_until_the_machine_was_quiet(
    seen: list[tuple[float, Presence]],
) -> None:
    now, needed_at = 0.0, None
    for (passed, presence), answer in zip(seen, play(seen), strict=True):
        now += passed
        if presence.at_keyboard:
            assert answer is not None
        if answer is not None:
            assert answer.patience <= 10
        if busy_reason(presence):
            needed_at = now
        elif needed_at is None or now >= needed_at + QUIET:
            assert answer is None


def test_a_load_counts_when_two_looks_see_it() -> None:
    load, quiet = Presence(cpu=0.9), Presence(cpu=0.0)
    assert [rest is not None for rest in play([(5, load), (5, quiet), (5, load), (5, load), (5, quiet)])] == [
        *(False, False, False, True, True)
    ]
    assert play([(5, load), (5, load), (QUIET, quiet)])[-1] is None
    first, later = play([(5, Presence(at_keyboard=True)), (5, load)])
    assert first == later  # the reason stays while it rests
    assert first is not None
    assert "someone uses" in first.reason


def test_sessions_of_this_machine_are_read() -> None:
    here = "Class=user\nRemote=no\nActive=yes\nIdleHint={}\n"
    assert sessions_in_use(here.format("no"))
    assert not sessions_in_use(here.format("yes"))
    others = [
        "Class=greeter\nRemote=no\nActive=yes\nIdleHint=no\n",
        "Class=user\nRemote=yes\nActive=yes\nIdleHint=no\n",
        "Class=user\nRemote=no\nActive=no\nIdleHint=no\n",
    ]
    assert not sessions_in_use("\n".join(others))
    assert sessions_in_use("\n".join([*others, here.format("no")]))
    assert not sessions_in_use("")


def test_what_others_do_with_a_gpu_is_read() -> None:
    said = """# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0        100     C     80      5      -      -      -      -    python
    0        200     G      7      1      -      -      -      -    Xorg
    0        300   C+G     20      1      -      -      -      -    game
    1          -     -      -      -      -      -      -      -    -
"""
    assert gpu_share(said, {100}) == 0.27
    assert gpu_share(said, {100, 200, 300}) == 0.0
    assert gpu_share("", set()) == 0.0


def test_the_idle_time_of_a_mac_is_read() -> None:
    assert idle_seconds_of_mac('    |   "HIDIdleTime" = 2500000000\n') == 2.5
    assert idle_seconds_of_mac("nothing") is None


def test_looking_at_this_machine_never_fails() -> None:
    presence = look()
    assert presence.cpu is None or 0 <= presence.cpu <= 1

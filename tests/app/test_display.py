"""On a terminal the display draws bars; anywhere else it prints plain lines that a log can keep."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from app.cli import output
from app.cli.output import table
from app.display import Display
from cluster.progress import Progress


def plain(text: io.StringIO) -> Console:
    return Console(file=text, force_terminal=False, width=120)


def test_plain_lines_name_stage_step_rate_and_note() -> None:
    text = io.StringIO()
    with Display(plain(text), 8) as display, display.stage("train"):
        display(Progress("train", 0, 60, "steps"))
        display._stages[-1].shown_at = 0
        display(Progress("train", 12, 60, "steps", rate=512.4, note="loss 0.831"))
    lines = text.getvalue().splitlines()
    assert lines[0] == "[1/8] train"
    assert "12/60 steps · 512 tokens/s" in lines[2]
    assert lines[2].endswith("left · loss 0.831")
    assert lines[-1].startswith("  ✓ train: ")
    assert "\x1b" not in text.getvalue()


def test_a_failed_stage_is_marked_and_the_error_passes_through() -> None:
    text = io.StringIO()
    with pytest.raises(ValueError, match="boom"), Display(plain(text)) as display, display.stage("data"):
        raise ValueError("boom")
    assert "✗ data" in text.getvalue()


def test_a_terminal_gets_one_bar_for_each_stage() -> None:
    text = io.StringIO()
    with Display(Console(file=text, force_terminal=True, width=100), 2) as display:
        with display.stage("one"):
            display(Progress("one", 1, 2, "files"))
        with display.stage("two"):
            display(Progress("two", 5, None, "rows"))
    drawn = text.getvalue()
    assert "✓ [1/2] one" in drawn
    assert "✓ [2/2] two" in drawn


def test_times_are_kept_in_order_and_late_reports_are_dropped() -> None:
    with Display(plain(io.StringIO())) as display:
        with display.stage("one"):
            pass
        display(Progress("one", 1, 1))
        with display.stage("two"):
            pass
    assert list(display.times()) == ["one", "two"]


def test_time_left_comes_from_the_pace_since_the_first_report() -> None:
    with Display(plain(io.StringIO())) as display, display.stage("train"):
        display(Progress("train", 10, 110))
        stage = display._stages[-1]
        assert stage.seconds_left() is None
        stage.first_at -= 5  # as if the first report had come five seconds ago
        display(Progress("train", 20, 110))
        left = stage.seconds_left()
        assert left is not None
        assert left == pytest.approx(45, abs=1)


def test_what_looks_like_markup_is_shown_as_it_is_and_breaks_nothing() -> None:
    odd = "list[str] [/tmp] tickets[/b].jsonl :warning:"
    text = io.StringIO()
    # A plain Console reads markup: the table must not depend on the console that prints it.
    Console(file=text, width=200).print(table(odd, ["x [/a]"], [[odd], [Text("✓ ok", "green")]]))
    assert text.getvalue().count(odd) == 2
    assert "x [/a]" in text.getvalue()
    assert "✓ ok" in text.getvalue()
    bars = io.StringIO()
    with Display(Console(file=bars, force_terminal=True, width=200), 1) as display, display.stage("data[/b]"):
        display(Progress("data", 1, 2, "rows", note="list[str] [/tmp]"))
    assert "data[/b]" in bars.getvalue()
    assert "list[str] [/tmp]" in bars.getvalue()


def test_the_consoles_of_the_verbs_read_no_markup() -> None:
    for console in (output.console, output.notes):
        assert console.render_str("list[str] [/tmp] :warning:").plain == "list[str] [/tmp] :warning:"

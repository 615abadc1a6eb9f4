"""The search and the legend's filters."""

from __future__ import annotations

from ui.page import Viewer

SEARCHES = (
    ("kind:attention", "kind === 'attention'"),
    ("kind:attention layer:2 worker:7", "kind === 'attention' && layer === 2 && worker === 7"),
    ("layer:1-2,none worker:0-3", "[1, 2, -1].includes(layer) && worker <= 3"),
    ("wait>3us phase:o_proj", "wait > 3000 && label.endsWith('o_proj')"),
    ("!kind:matmul step:2", "kind !== 'matmul' && step === 2"),
    ("label:layers.3.down_proj time<=10us", "label === 'layers.3.down_proj' && time <= 10000"),
    ("down worker:5", "label.includes('down') && worker === 5"),
    ("bytes>=200KB", "bytes >= 200000"),
    ("wait > 3us phase:o_proj", "wait > 3000 && label.endsWith('o_proj')"),
    ('phase:"gate_up" bytes >=200KB', "bytes >= 200000 && label.endsWith('gate_up')"),
)


def search(viewer: Viewer, query: str) -> None:
    """Type a query in place of the one before."""
    viewer.page.keyboard.press("/")
    viewer.page.keyboard.press("Control+A")
    viewer.page.keyboard.type(query)
    viewer.settle()


def test_search_finds_what_it_says(opened: Viewer) -> None:
    for query, test in SEARCHES:
        search(opened, query)
        wanted = opened.run(
            "Array.from(pane.trace.worker, (worker, r) => { const t = pane.trace,"
            " kind = t.kindOf(r), label = t.labelOf(r), layer = t.layer[r], step = t.step[r],"
            " bytes = t.bytes[r], wait = t.waitOf(r), time = t.span(r)[1] - t.span(r)[0];"
            f" return {test}; }}).filter(Boolean).length"
        )
        assert wanted > 0, query
        assert opened.run("app.matches.records.length") == wanted, query
        count = opened.page.locator(".count")
        assert f"{wanted:,} found" in count.inner_text(), query
        opened.page.keyboard.press("Enter")
        opened.settle()
        assert opened.run("app.matches.mask[app.selected.record]") == 1, query
        assert " of " in count.inner_text(), query


def test_a_sign_between_quotes_is_no_comparison(opened: Viewer) -> None:
    opened.run("""app.search('label:"a > b"')""")
    opened.settle()
    assert opened.run("app.queryError") == ""
    assert opened.run("app.matches.records.length") == 0


def test_next_and_previous_match_go_around(opened: Viewer) -> None:
    opened.run("app.search('kind:sample')")
    opened.page.locator(".overlay").focus()
    seen = []
    for key in ("n", "n", "n", "n", "Shift+N"):
        opened.page.keyboard.press(key)
        opened.settle()
        seen.append(opened.run("pane.trace.step[app.selected.record]"))
    assert sorted(seen[:3]) == [0, 1, 2]
    assert seen[3] == seen[0]
    assert seen[4] == seen[2]
    opened.screenshot("search")


def test_search_says_what_it_does_not_understand(opened: Viewer) -> None:
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("wait>soon")
    opened.settle()
    assert '"soon" is not a time such as 3us' in opened.page.locator(".count").inner_text()
    opened.page.keyboard.press("Escape")
    opened.settle()
    assert opened.run("app.query") == ""


def test_a_term_without_a_value_says_what_it_takes(opened: Viewer) -> None:
    for query, said in (
        ("kind:", "this trace has attention, embed, "),
        ("layer:", '"" is not a layer'),
        ("wait>", '"" is not a time such as 3us'),
        ("colour:", 'there is no "colour:" to search for'),
    ):
        search(opened, query)
        assert said in opened.page.locator(".count").inner_text(), query


def test_signs_on_buttons_have_names(opened: Viewer) -> None:
    for name in ("zoom in", "zoom out", "the match before", "the next match"):
        assert opened.page.get_by_role("button", name=name, exact=True).count() == 1


def test_legend_filters(opened: Viewer) -> None:
    opened.page.locator(".legend .entry", has_text="o_proj").click()
    opened.settle()
    assert opened.run("app.query") == "phase:o_proj"
    assert opened.run("app.matches.records.length") == 132 * 4 * 3
    opened.page.locator(".legend .entry", has_text="o_proj").click()
    opened.settle()
    assert opened.run("app.query") == ""

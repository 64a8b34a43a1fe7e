"""Widths of a selector's network."""

from nde_talf.selector.selector_settings import SelectorConfig


def test_widths_follow_the_draft_up_to_the_papers():
    assert (
        SelectorConfig().widths(4096) == SelectorConfig().widths(512) == (128, (512, 32))
    )  # section 6, NDE paper
    assert SelectorConfig().widths(6) == SelectorConfig().widths(128) == (32, (128, 32))
    assert SelectorConfig(width=24).widths(4096) == (24, (96, 32))
    assert SelectorConfig(width=24, hidden=[7, 5]).widths(4096) == (24, (7, 5))

"""Stop strings: cut exactly, hold what may become one, whatever the pieces."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.states import FinishReason
from router.text.detokenizer import ByteDetokenizer
from router.text.stop_strings import StopMatcher
from router.text.text_stream import TextStream


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        out.append(matcher.push(piece))
        if matcher.matched:
            return out, True
    return [*out, matcher.flush()], False


def first_cut(stops: list[str], text: str) -> int | None:
    """Before the first stop string to be completed; the longest, if several are at once."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return end - max(lengths)
    return None


def test_a_stop_string_over_several_pieces_never_leaks() -> None:
    assert run(["DEFGHIJ"], ["ABC", "DE", "FG", "HIJ", "K"]) == (["ABC", "", "", ""], True)


def test_a_near_match_is_released_as_soon_as_it_fails() -> None:
    assert run(["\nUser:"], ["hi\n", "Use", "d"]) == (["", "", "hi\nUsed", ""], False)


def test_held_text_is_flushed_at_the_end() -> None:
    assert run(["END"], ["a E", "N"]) == (["", "", "a EN"], False)


def test_a_stop_string_that_ends_inside_a_piece() -> None:
    assert run(["stop"], ["please st", "op now"]) == (["", "please "], True)


def test_overlapping_starts_are_tried_again() -> None:
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], True)


def test_the_first_completed_wins_and_of_those_the_longest() -> None:
    assert run(["abcdef", "cd"], ["abcdef"]) == (["ab"], True)
    assert run(["d", "bcd"], ["abcd"]) == (["a"], True)


@settings(max_examples=150, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_any_split_gives_the_text_cut_at_the_right_place(
    stops: list[str], pieces: list[str]
) -> None:
    out, matched = run(stops, pieces)
    whole = "".join(pieces)
    cut = first_cut(stops, whole)
    assert matched == (cut is not None)
    assert "".join(out) == (whole if cut is None else whole[:cut])


@settings(max_examples=100, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_no_more_is_held_than_could_become_a_stop_string(
    stops: list[str], pieces: list[str]
) -> None:
    """But for the beginning of the piece in which that begins."""
    matcher = StopMatcher(stops)
    shown = ""
    for i, piece in enumerate(pieces):
        shown += matcher.push(piece)
        if matcher.matched:
            return
        begun = i + 1 - matcher.num_held
        assert shown == "".join(pieces[:begun])
        held = "".join(pieces[begun : i + 1])
        starts = range(len(pieces[begun])) if held else ()
        assert not held or any(stop.startswith(held[at:]) for stop in stops for at in starts)


LETTERS = [bytes([97 + i]) for i in range(26)] + [b"\xf0\x9f", b"\x99\x82"]


def text_stream(stops: list[str], min_tokens: int = 0) -> TextStream:
    return TextStream(ByteDetokenizer(LETTERS), StopMatcher(stops), min_tokens=min_tokens)


def feed(stream: TextStream, tokens: list[int], last: FinishReason) -> str:
    text = ""
    for i, token in enumerate(tokens):
        text += stream.push(token, last if i == len(tokens) - 1 else None)
        if stream.finish is not None:
            break
    return text


def test_the_stop_token_is_counted_but_not_shown() -> None:
    stream = text_stream([])
    assert feed(stream, [0, 1, 2], FinishReason.STOP) == "ab"
    assert (stream.tokens, stream.finish) == (3, FinishReason.STOP)


def test_a_stop_string_ends_the_output_early() -> None:
    stream = text_stream(["cd"])
    assert feed(stream, [0, 1, 2, 3, 4], FinishReason.LENGTH) == "ab"
    assert (stream.tokens, stream.finish) == (4, FinishReason.STOP)


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    stream = text_stream(["bc"])
    assert feed(stream, [0, 1, 2], FinishReason.LENGTH) == "a"
    assert stream.finish is FinishReason.STOP


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    stream = text_stream(["b"], min_tokens=3)
    assert feed(stream, [1, 1, 1, 0, 1, 0], FinishReason.LENGTH) == "bbba"
    assert (stream.tokens, stream.finish) == (5, FinishReason.STOP)


def test_length_flushes_held_text_and_half_characters() -> None:
    stream = text_stream(["cde"])
    assert feed(stream, [0, 2, 3, 26], FinishReason.LENGTH) == "acd\ufffd"
    assert stream.finish is FinishReason.LENGTH


def test_an_end_at_the_first_token_is_an_empty_text() -> None:
    stream = text_stream(["x"])
    assert feed(stream, [0], FinishReason.STOP) == ""
    assert stream.finish is FinishReason.STOP


@settings(max_examples=100, deadline=None)
@given(
    stops=st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(
        st.tuples(st.text("ab<", max_size=3), st.sampled_from(["", "<a>"])), max_size=6
    ),
    include=st.booleans(),
)
def test_hidden_text_matches_and_is_not_shown(
    stops: list[str], pieces: list[tuple[str, str]], include: bool
) -> None:
    text = "".join(shown + hidden for shown, hidden in pieces)
    mask = "".join("s" * len(shown) + "h" * len(hidden) for shown, hidden in pieces)
    cut = first_cut(stops, text)
    matcher, out = StopMatcher(stops, include=include), ""
    for shown, hidden in pieces:
        out += matcher.push(shown, hidden)
    assert (matcher.matched in stops) == (cut is not None)
    out += matcher.flush()
    end = len(text) if cut is None else cut
    wanted = "".join(c for c, m in zip(text[:end], mask[:end], strict=True) if m == "s")
    if include and cut is not None:
        assert out.startswith(wanted)
        assert out[len(wanted) :] in stops
        assert text[cut:].startswith(out[len(wanted) :])
    else:
        assert out == wanted

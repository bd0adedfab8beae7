"""Messages of errors: what they quote was written by others, and is kept in a database."""

from rl_core.errors import RemoteFailed, RlCoreError, SpecError, StoreUnavailable


def test_a_message_has_nothing_that_no_database_stores():
    for kind in (RlCoreError, SpecError, StoreUnavailable, RemoteFailed):
        assert str(kind("it says a\0b\ud800c, né")) == "it says a\ufffdb?c, né"

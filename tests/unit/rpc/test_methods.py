from protocol.message import Message
from rpc import methods
from rpc.methods import Method

METHODS = [value for value in vars(methods).values() if isinstance(value, Method)]


def test_no_two_methods_share_a_path():
    paths = [method.path for method in METHODS]
    assert len(paths) == len(set(paths)) == 15
    assert methods.SUBMIT.path == "/baton.worker.v1.Worker/Submit"


def test_every_method_carries_messages():
    for method in METHODS:
        assert issubclass(method.request, Message)
        assert issubclass(method.reply, Message)


def test_only_events_stream():
    assert [method.name for method in METHODS if method.streams] == ["Events"]
